"""Where parameters lie in a legacy flat buffer of DistributedOptimizer: buckets one after another, without padding."""

from collections.abc import Sequence

from hp_muon_plugin.checkpoint.buckets import aligned

Entry = tuple[str, int, bool]
"""Name, elements, and whether it has a bucket of its own."""


def layout(entries: Sequence[Entry], bucket_size: int | None = None) -> tuple[dict[str, int], int]:
    """Places of parameters.

    Args:
        entries: In the model's order; buffers hold them the other way round.
        bucket_size: Elements at which a bucket is closed; None for one bucket.

    Returns:
        First element of each in the buffer, and the elements of the whole.
    """
    starts: dict[str, int] = {}
    base = offset = 0
    for name, numel, alone in reversed(entries):
        if alone and offset:
            base, offset = base + offset, 0
        offset = aligned(offset)
        starts[name] = base + offset
        offset += numel
        if alone or (bucket_size is not None and offset >= bucket_size):
            base, offset = base + offset, 0
    return starts, base + offset


def starts_of(entries: Sequence[Entry], length: int) -> dict[str, int] | None:
    """Places of parameters in a buffer of known length.

    The size at which buckets were closed is not in the checkpoint. It is one of the lengths that a run of parameters
    can have; the layouts that they give are tried.

    Args:
        entries: In the model's order.
        length: Elements of the buffer, without padding at its end.

    Returns:
        First element of each; None if no size of buckets gives the length, or several give it in different ways.
    """
    starts, total = layout(entries)
    if total == length:
        return starts
    found: list[dict[str, int]] = []
    sizes, offset = set(), 0
    for _, numel, _ in reversed(entries):
        offset = aligned(offset) + numel
        sizes.add(offset)
    for size in sorted(sizes):
        starts, total = layout(entries, size)
        if total == length and starts not in found:
            found.append(starts)
    return found[0] if len(found) == 1 else None
