"""A range of elements of an array as boxes: how checkpoint formats that know only boxes hold flat shards."""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A part of an array.

    Attributes:
        offset: First index along every dim.
        shape: Its shape.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up a range, one after another in the array's own order.

    Args:
        shape: Shape of the array.
        start: First element of the range, in row-major order.
        stop: One past the last.

    Returns:
        At most ``2 * len(shape) - 1`` boxes: whole rows, and what is left before and after them. The elements of each
        lie next to each other.
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    found = []
    if head:
        found += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(shape, last, 0, tail)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes(shape[1:], start, stop)]
