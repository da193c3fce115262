"""Where parameters lie in a legacy flat buffer of DistributedOptimizer: buckets one after another, without padding."""

from collections.abc import Sequence
from itertools import accumulate

from hp_muon_plugin.checkpoint.buckets import Slot, aligned

Entry = tuple[str, int, bool]
"""Name, elements, and whether it has a bucket of its own."""


def buckets(entries: Sequence[Entry], bucket_size: int | None = None) -> tuple[dict[str, Slot], list[int]]:
    """Places of parameters in buckets, as megatron-core lays them out.

    Args:
        entries: In the model's order; buffers hold them the other way round.
        bucket_size: Elements at which a bucket is closed; None for one bucket.

    Returns:
        Place of each, and the length of each bucket without padding at its end. A bucket that is closed because the
        next parameter has its own ends where that one would have begun: at a multiple of 64.
    """
    slots: dict[str, Slot] = {}
    lengths: list[int] = []
    offset = 0
    for name, numel, alone in reversed(entries):
        offset = aligned(offset)
        if alone and offset:
            lengths.append(offset)
            offset = 0
        slots[name] = Slot(len(lengths), offset)
        offset += numel
        if alone or (bucket_size is not None and offset >= bucket_size):
            lengths.append(offset)
            offset = 0
    return slots, lengths + ([offset] if offset else [])


def layout(entries: Sequence[Entry], bucket_size: int | None = None) -> tuple[dict[str, int], int]:
    """Places of parameters where buckets lie one after another.

    Args:
        entries: As in :func:`buckets`.
        bucket_size: Likewise.

    Returns:
        First element of each in the buffer, and the elements of the whole.
    """
    slots, lengths = buckets(entries, bucket_size)
    firsts = [0, *accumulate(lengths)]
    return {name: firsts[slot.bucket] + slot.start for name, slot in slots.items()}, firsts[-1]


def laid(entries: Sequence[Entry], lengths: Sequence[int]) -> dict[str, Slot] | None:
    """Places of parameters in buckets of known lengths; None if they do not fill them.

    Args:
        entries: As in :func:`buckets`.
        lengths: Of each bucket without padding at its end.
    """
    slots: dict[str, Slot] = {}
    bucket = offset = 0
    for name, numel, _ in reversed(entries):
        if bucket < len(lengths) and offset and aligned(offset) >= lengths[bucket]:
            bucket, offset = bucket + 1, 0
        start = aligned(offset)
        if bucket == len(lengths) or start + numel > lengths[bucket]:
            return None
        slots[name] = Slot(bucket, start)
        offset = start + numel
    return slots if bucket == len(lengths) - 1 and aligned(offset) >= lengths[bucket] else None


def bucket_size(entries: Sequence[Entry], lengths: Sequence[int]) -> int | None:
    """A number of elements at which closing buckets gives these lengths; None if there is none, or no need of one."""
    sizes = [None, *sorted(set(lengths))]
    return next((size for size in sizes if buckets(entries, size)[1] == list(lengths)), None)


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
