"""Flat buffers of Megatron's DistributedOptimizer: which parameter lies where in them.

The buffers hold parameters in reverse order of registration, each at a multiple of 64 elements within its bucket,
and name none of them. The place of every parameter is proved by its content: the rounded master is the stored weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hp_muon_plugin.errors import DamageError

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a parameter.

    Attributes:
        bucket: Index of the bucket.
        start: First element in it.
    """

    bucket: int
    start: int


Matches = Callable[[str, Slot], bool]
"""Whether the elements at a place, rounded to the weight's dtype, are the stored weight of a name."""


def aligned(offset: int) -> int:
    """The next multiple of 64."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def placed(
    names: Sequence[str], numels: dict[str, int], lengths: Sequence[int], matches: Matches, where: str
) -> dict[str, Slot]:
    """Find every parameter of a buffer.

    Args:
        names: Candidates, in the order in which they are expected. A buffer may hold fewer.
        numels: Elements of each.
        lengths: Elements of each bucket, without the padding at its end.
        matches: Proof by content.
        where: The buffer, for messages.

    Returns:
        Place of each parameter that the buffer holds.

    Raises:
        CheckpointError: If a stretch of the buffer is no known parameter, or could be several.
    """
    left = list(names)
    found: dict[str, Slot] = {}
    position = 0
    for bucket, length in enumerate(lengths):
        offset = 0
        while aligned(offset) < length:  # a bucket may end with the alignment of what has its own behind it
            slot = Slot(bucket, aligned(offset))
            room = length - slot.start
            name = _next(left, position, numels, room, slot, matches, where)
            found[name] = slot
            position = left.index(name)
            left.pop(position)
            offset = slot.start + numels[name]
    return found


def _next(
    left: Sequence[str], position: int, numels: dict[str, int], room: int, slot: Slot, matches: Matches, where: str
) -> str:
    fitting = [name for name in left if numels[name] <= room]
    if position < len(left) and left[position] in fitting and matches(left[position], slot):
        return left[position]
    found = [name for name in fitting if matches(name, slot)]
    if len(found) == 1:
        return found[0]
    what = "is none of its parameters" if not found else f"may be any of {', '.join(found[:3])}"
    raise DamageError(
        f"{where}: what lies at element {slot.start} of bucket {slot.bucket} {what}: its rounded master is not the "
        "stored weight\n  fix: the optimizer state is damaged or of another model; save again as fully_reshardable"
    )
