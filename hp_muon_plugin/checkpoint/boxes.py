"""Boxes of indices: which chunks of a tensor meet, overlap, or leave a hole."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor.

    Attributes:
        offsets: First index in every dimension.
        sizes: Lengths.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.sizes)

    def meets(self, other: "Box") -> "Box | None":
        """What both hold, in the same coordinates; None if nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def contains(self, other: "Box") -> bool:
        """Whether all of the other one lies in this one."""
        for start, length, first, count in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            if first < start or first + count > start + length:
                return False
        return True

    def within(self, origin: Sequence[int]) -> "Box":
        """The same box in coordinates that begin at ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)


class BoxIndex:
    """Finds the boxes that meet another one.

    Args:
        boxes: All of one rank.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        if len(boxes) == 1:
            return  # as most tensors have
        dims = len(boxes[0].offsets) if boxes else 0
        self._starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
        self._ends = self._starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), dims)

    def meeting(self, box: Box) -> list[int]:
        """Indices of the boxes that share an element with ``box``."""
        if len(self._boxes) == 1:
            return [0] if self._boxes[0].meets(box) else []
        start = np.array(box.offsets, dtype=np.int64)
        end = start + np.array(box.sizes, dtype=np.int64)
        found = ((self._starts < end) & (self._ends > start)).all(axis=1)
        return [int(index) for index in np.flatnonzero(found)]


def overlapping(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or None.

    Args:
        boxes: All of one rank.
    """
    if len(boxes) < 2:
        return None
    if not boxes[0].offsets:
        return 0, 1
    starts = np.array([box.offsets for box in boxes], dtype=np.int64)
    ends = starts + np.array([box.sizes for box in boxes], dtype=np.int64)
    dim = max(range(starts.shape[1]), key=lambda d: len(np.unique(starts[:, d])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, ends = starts[order], ends[order]
    limits = np.searchsorted(starts[:, dim], ends[:, dim], side="left")
    for index in range(len(boxes)):
        later = slice(index + 1, max(index + 1, int(limits[index])))
        shared = ((starts[later] < ends[index]) & (ends[later] > starts[index])).all(axis=1)
        if shared.any():
            return int(order[index]), int(order[index + 1 + int(np.flatnonzero(shared)[0])])
    return None
