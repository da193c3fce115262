"""Where what one rank holds of a parameter lies in the whole: boxes of indices, none of them gathered.

A rank holds a contiguous range of its tensor-parallel part. A range is at most three boxes of a matrix: the
rest of a row, whole rows, the beginning of a row. A part that is cut along a dim of the shape shifts these
boxes; one that is cut along another dim, as a gated first layer ``[gate_r; up_r]``, is several stretches of
the whole.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from hp_muon_plugin.layout.spec import AxisSplit


class Chunk(NamedTuple):
    """A box of a whole tensor, and where a rank has its elements.

    Attributes:
        offsets: First index in every dimension.
        sizes: Lengths.
        first: Its first element in the rank's tensor-parallel part; the others follow it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def chunks_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Chunk]:
    """The boxes of a contiguous range of a tensor.

    Args:
        shape: Of the tensor.
        start: First element.
        stop: One past the last.

    Yields:
        Boxes in the order of their elements.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Chunk((start,), (stop - start,), start) if shape else Chunk((), (), start)
        return
    row = math.prod(shape[1:])
    above, below = -(-start // row), stop // row  # whole rows begin and end here
    inner: list[tuple[int, int, int]] = []
    if above > below:
        inner.append((below, start, stop))
    elif start < above * row:
        inner.append((above - 1, start, above * row))
    yield from (chunk for piece in inner for chunk in _inside(shape, row, *piece))
    if above < below:
        yield Chunk((above, *(0 for _ in shape[1:])), (below - above, *shape[1:]), above * row)
    if above <= below and below * row < stop:
        yield from _inside(shape, row, below, below * row, stop)


def held_chunks(
    shape: tuple[int, ...], split: AxisSplit | None, index: int, start: int, stop: int
) -> tuple[Chunk, ...]:
    """The boxes of a whole parameter that a rank holds.

    Args:
        shape: Of the whole parameter.
        split: How tensor-parallel ranks share it, or None.
        index: This rank's place among these.
        start: First element of its tensor-parallel part that the rank holds.
        stop: One past the last.

    Returns:
        Boxes in the order in which the rank holds their elements.
    """
    if split is None or split.size == 1:
        return tuple(chunks_of_range(shape, start, stop))
    factors, dim = split.factors, split.dim
    length = factors[dim] // split.size
    if factors == shape:
        own = (*shape[:dim], length, *shape[dim + 1 :])
        found = chunks_of_range(own, start, stop)
        return tuple(chunk._replace(offsets=_shifted(chunk.offsets, dim, index * length)) for chunk in found)
    inner = math.prod(factors[dim + 1 :])
    stretch, period = length * inner, factors[dim] * inner
    chunks: list[Chunk] = []
    for number in range(start // stretch, -(-stop // stretch)):
        own_first = number * stretch
        shift = number * period + index * stretch - own_first  # from the rank's count of elements to the whole's
        low, high = max(start, own_first), min(stop, own_first + stretch)
        found = chunks_of_range(shape, low + shift, high + shift)
        chunks += [chunk._replace(first=chunk.first - shift) for chunk in found]
    return tuple(chunks)


def _inside(shape: tuple[int, ...], row: int, number: int, start: int, stop: int) -> Iterator[Chunk]:
    """A range inside one row."""
    for chunk in chunks_of_range(shape[1:], start - number * row, stop - number * row):
        yield Chunk((number, *chunk.offsets), (1, *chunk.sizes), chunk.first + number * row)


def _shifted(offsets: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :])
