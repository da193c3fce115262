"""Memory for gathered weights and whole gradients, taken once and used by one unit after the other.

Tensors that autograd saves are views of a unit's gathered weights, so a unit's weights must lie at the
same place in forward and in backward. Each unit therefore has a fixed slot: units that follow each
other have different ones, and units further apart share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 256  # bytes; what accelerators' allocators give


def aligned(num_bytes: int) -> int:
    """The next multiple of the alignment of buckets in a slot."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class Slot:
    """Memory that one unit at a time uses.

    Attributes:
        num_bytes: Enough for each unit that shares it.
        device: Where.
        holder: Who uses it now; None if nobody.
    """

    num_bytes: int
    device: torch.device
    holder: object | None = None
    _memory: torch.Tensor | None = None

    def cut(self, pieces: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """One-dimensional tensors in the slot.

        Args:
            pieces: Elements and type of each.

        Returns:
            Uninitialised tensors that do not overlap.
        """
        if self._memory is None:
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        result, start = [], 0
        for numel, dtype in pieces:
            result.append(self._memory[start : start + numel * dtype.itemsize].view(dtype))
            start += aligned(numel * dtype.itemsize)
        return result


def num_bytes(pieces: Sequence[tuple[int, torch.dtype]]) -> int:
    """Bytes of a slot for some tensors.

    Args:
        pieces: Elements and type of each.

    Returns:
        Bytes, with alignment.
    """
    return sum(aligned(numel * dtype.itemsize) for numel, dtype in pieces)


def slots(sizes: Sequence[int], is_shared: Sequence[bool], count: int, device: torch.device) -> list[Slot]:
    """Slots of units in execution order.

    Args:
        sizes: Bytes of each unit.
        is_shared: Whether a unit may share. Units that others run inside of, and units that stay gathered,
            may not.
        count: Slots that the units that may share divide between them.
        device: Where.

    Returns:
        The slot of each unit.
    """
    shared = [size for size, may in zip(sizes, is_shared, strict=True) if may]
    common = [Slot(max(shared[place::count], default=0), device) for place in range(count)]
    result, place = [], 0
    for size, may in zip(sizes, is_shared, strict=True):
        result.append(common[place % count] if may else Slot(size, device))
        place += may
    return result
