"""Applying a matrix view to tensors: strided views where strides allow, never a hidden copy."""

import math

import torch

from hp_muon_plugin.layout.spec import AxisSplit, MatrixPart, MatrixView


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
    strided = part_tensor(tensor, view, part)
    try:
        return strided.view(view.part_shape(part))
    except RuntimeError:
        return None


def slot_like(slot: torch.Tensor, view: MatrixView, part: MatrixPart, *, is_transposed: bool) -> torch.Tensor:
    """A workspace slot in the factored dims of a part, so that elementwise operations line up.

    Args:
        slot: ``(count, short, long)``, contiguous.
        view: How the parameter reads as matrices.
        part: One of ``view.parts``.
        is_transposed: Whether the matrices are tall, so that the slot holds them transposed.

    Returns:
        A view of ``slot`` of the same shape as :func:`part_tensor` gives.
    """
    sizes = list(view.factors)
    if part.narrow is not None:
        sizes[part.narrow[0]] = part.narrow[2]
    batch, rows, cols = ([sizes[dim] for dim in dims] for dims in (part.batch, part.rows, part.cols))
    if not is_transposed:
        return slot.view(*batch, *rows, *cols)
    dims = len(batch)
    factored = slot.view(*batch, *cols, *rows)
    order = [*range(dims), *range(dims + len(cols), factored.dim()), *range(dims, dims + len(cols))]
    return factored.permute(order)


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
