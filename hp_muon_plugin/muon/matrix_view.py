"""Applying a matrix view to tensors: strided views where strides allow, never a hidden copy."""

import math
from dataclasses import dataclass

import torch

from hp_muon_plugin.layout.spec import AxisSplit, MatrixPart, MatrixView


@dataclass(frozen=True, slots=True)
class Tile:
    """Some matrices of a part as one three-dimensional view.

    Attributes:
        tensor: ``(count, rows, cols)``; or, for one matrix whose rows lie in blocks apart,
            ``(blocks, rows / blocks, cols)``.
        first: Number of its first matrix in the part.
        count: Matrices in it.
    """

    tensor: torch.Tensor
    first: int
    count: int


def part_tensor(tensor: torch.Tensor, view: MatrixView, part: MatrixPart) -> torch.Tensor:
    """The elements of one part, as a strided view with the part's dims in batch, rows, cols order.

    Args:
        tensor: A whole parameter (or anything of its elements), contiguous, any dtype.
        view: How it reads as matrices.
        part: One of ``view.parts``.

    Returns:
        A view of shape ``(*batch, *rows, *cols)`` by factors; it shares memory with ``tensor``.
    """
    factored = tensor.view(view.factors)
    if part.narrow is not None:
        factored = factored.narrow(*part.narrow)
    return factored.permute(*part.batch, *part.rows, *part.cols)


def as_matrices(tensor: torch.Tensor, view: MatrixView, part: MatrixPart) -> torch.Tensor | None:
    """One part as ``(count, rows, cols)`` without a copy, or None where strides do not allow it.

    Args:
        tensor: A whole parameter, contiguous, any dtype.
        view: How it reads as matrices.
        part: One of ``view.parts``.

    Returns:
        A view that shares memory with ``tensor``, or None.
    """
    return _viewed(part_tensor(tensor, view, part), view.part_shape(part))


def tiles(tensor: torch.Tensor, view: MatrixView, part: MatrixPart) -> list[Tile] | None:
    """One part as views that a batched product can write, without a copy.

    Args:
        tensor: A whole parameter, contiguous, any dtype.
        view: How it reads as matrices.
        part: One of ``view.parts``.

    Returns:
        Tiles that cover every matrix once, or None where strides allow none.
    """
    count, rows, cols = view.part_shape(part)
    return _tiles(part_tensor(tensor, view, part), len(part.batch), len(part.rows), 0, (count, rows, cols))


def _tiles(
    strided: torch.Tensor, num_batch: int, num_rows: int, first: int, shape: tuple[int, int, int]
) -> list[Tile] | None:
    count, rows, cols = shape
    whole = _viewed(strided, shape)
    if whole is not None:
        return [Tile(whole, first, count)]
    if num_batch == 0:
        if num_rows < 2:
            return None
        blocks = strided.shape[0]
        in_blocks = _viewed(strided, (blocks, rows // blocks, cols))
        return None if in_blocks is None else [Tile(in_blocks, first, 1)]
    each = count // strided.shape[0]
    found: list[Tile] = []
    for index, piece in enumerate(strided.unbind(0)):
        inner = _tiles(piece, num_batch - 1, num_rows, first + index * each, (each, rows, cols))
        if inner is None:
            return None
        found += inner
    return found


def _viewed(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    try:
        return tensor.view(shape)
    except RuntimeError:
        return None


def slot_like(slot: torch.Tensor, view: MatrixView, part: MatrixPart) -> torch.Tensor:
    """A workspace slot in the factored dims of a part, so that elementwise operations line up.

    Args:
        slot: ``(count, rows, cols)``, contiguous.
        view: How the parameter reads as matrices.
        part: One of ``view.parts``.

    Returns:
        A view of ``slot`` of the same shape as :func:`part_tensor` gives.
    """
    sizes = list(view.factors)
    if part.narrow is not None:
        sizes[part.narrow[0]] = part.narrow[2]
    return slot.view([sizes[dim] for dim in (*part.batch, *part.rows, *part.cols)])


def local_slice(whole: torch.Tensor, split: AxisSplit, index: int) -> torch.Tensor:
    """The part of a whole parameter that one rank of the axis holds, as a strided view.

    Args:
        whole: The whole parameter, contiguous.
        split: How it is cut.
        index: The rank's place on the axis.

    Returns:
        A view of shape ``split.local_factors()``.
    """
    length = split.factors[split.dim] // split.size
    return whole.view(split.factors).narrow(split.dim, index * length, length)


def fill_from_shards(whole: torch.Tensor, shards: torch.Tensor, split: AxisSplit) -> None:
    """Put the gathered shards of all ranks of the axis together.

    Args:
        whole: Receives the whole parameter; contiguous.
        shards: ``(size, local_numel)``, the ranks' parts in axis order.
        split: How it is cut.
    """
    local = split.local_factors()
    assert shards.shape == (split.size, math.prod(local)), (shards.shape, split)
    for index in range(split.size):
        local_slice(whole, split, index).copy_(shards[index].view(local))
