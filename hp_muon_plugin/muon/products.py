"""Matrix products of the iteration, full or symmetric, always into given buffers.

All products here have a symmetric result: they are Gram matrices, or products of polynomials of one
Gram matrix, which commute. A symmetric product computes the lower block triangle and mirrors it,
diagonal blocks included: mirroring only some of them costs 10 to 100 times the accuracy. So does
mirroring the factors ``Q`` under some schedules (:func:`hp_muon_plugin.muon.runs.are_factors_mirrored`).

The products of small matrices are returned as operations on fixed buffers, so that a step runs them
again without building anything.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.muon.algorithm import Algorithm
from hp_muon_plugin.muon.workspace import Workspace

_SQUARES_FROM = 16  # block rows; measured, fewer are as fast in one product each

# A call on fixed buffers, with all its arguments.
Operation = partial[Any]


def run_all(operations: Iterable[Operation]) -> None:
    """Run operations in order.

    Args:
        operations: What to run.
    """
    for operation in operations:
        operation()


class Products(Protocol):
    """The products that one algorithm uses.

    Attributes:
        is_mirroring: Whether blocks of the results are transposed into place on the CPU.
        turns_tall: Whether tall matrices had better be read as wide ones.
    """

    is_mirroring: bool
    turns_tall: bool

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """``out = X X^T`` where ``out`` has as many rows as ``X``, otherwise ``X^T X``.

        Args:
            x: ``(B, M, N)``, any strides.
            out: ``(B, m, m)`` with ``m`` one of ``M`` and ``N``.
        """

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """``out = linear * R + quadratic * R R`` for symmetric ``R``, ``(B, m, m)``."""

    def product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        addend: torch.Tensor,
        *,
        factor: float,
        out: torch.Tensor,
        is_mirrored: bool = True,
    ) -> list[Operation]:
        """``out = factor * addend + left right`` for commuting symmetric matrices, ``(B, m, m)``.

        Args:
            left: First factor.
            right: Second factor.
            addend: What is added.
            factor: Its factor.
            out: Receives the result; none of the others.
            is_mirrored: Whether the upper triangle may be the mirrored lower one.
        """


class FullProducts:
    """Every entry is computed: batched products in one call each."""

    is_mirroring = False
    turns_tall = False

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        left, right = (x, x.mT) if x.shape[1] == out.shape[1] else (x.mT, x)
        return [Operation(torch.bmm, left, right, out=out)]

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        return [Operation(torch.baddbmm, r, r, r, beta=linear, alpha=quadratic, out=out)]

    def product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        addend: torch.Tensor,
        *,
        factor: float,
        out: torch.Tensor,
        is_mirrored: bool = True,
    ) -> list[Operation]:
        """See :class:`Products`."""
        return [Operation(torch.baddbmm, addend, left, right, beta=factor, out=out)]


class BlockSymmetricProducts:
    """Half the work for large matrices, with ordinary products of block rows.

    With ``k`` block rows ``(k + 1) / 2k`` of a full product is computed.

    Args:
        num_blocks: Block rows.
        workspace: Where the scratch for mirroring comes from.
    """

    is_mirroring = True
    turns_tall = False

    def __init__(self, num_blocks: int, workspace: Workspace) -> None:
        self._num_blocks = num_blocks
        self._workspace = workspace
        self._half = torch.tensor(0.5, device=workspace.device)

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        y = x if x.shape[1] == out.shape[1] else x.mT
        operations = [
            Operation(torch.bmm, y[:, rows], y[:, cols].mT, out=out[:, rows, cols])
            for rows, cols in self._blocks(out.shape[1])
        ]
        return operations + self._mirror(out)

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        operations = []
        for rows, cols in self._blocks(r.shape[1]):
            args = (r[:, rows, cols], r[:, rows], r[:, :, cols])
            operations.append(Operation(torch.baddbmm, *args, beta=linear, alpha=quadratic, out=out[:, rows, cols]))
        return operations + self._mirror(out)

    def product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        addend: torch.Tensor,
        *,
        factor: float,
        out: torch.Tensor,
        is_mirrored: bool = True,
    ) -> list[Operation]:
        """See :class:`Products`."""
        if not is_mirrored:
            return [Operation(torch.baddbmm, addend, left, right, beta=factor, out=out)]
        operations = []
        for rows, cols in self._blocks(left.shape[1]):
            args = (addend[:, rows, cols], left[:, rows], right[:, :, cols])
            operations.append(Operation(torch.baddbmm, *args, beta=factor, out=out[:, rows, cols]))
        return operations + self._mirror(out)

    def _blocks(self, size: int) -> list[tuple[slice, slice]]:
        return lower_blocks(block_rows(size, self._num_blocks))

    def _mirror(self, out: torch.Tensor) -> list[Operation]:
        operations = []
        for start, stop in block_rows(out.shape[1], self._num_blocks):
            if start:
                below = out[:, start:stop, :start].mT
                operations.append(Operation(out[:, :start, start:stop].copy_, below))
            block = out[:, start:stop, start:stop]
            scratch = self._workspace.take("mirror", tuple(block.shape), out.dtype)
            operations.append(Operation(torch.add, block, block.mT, out=scratch))
            operations.append(Operation(torch.mul, scratch, self._half, out=block))
        return operations


def block_rows(size: int, num_blocks: int) -> list[tuple[int, int]]:
    """Bounds of block rows of about equal height.

    Args:
        size: Rows.
        num_blocks: Block rows, of one row at least.

    Returns:
        First row and end of each.
    """
    blocks = min(num_blocks, size)
    bounds = [size * block // blocks for block in range(blocks + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def lower_blocks(rows: list[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """Blocks that cover the lower triangle: one per block row, or larger squares if there are many rows.

    Args:
        rows: From :func:`block_rows`.

    Returns:
        Rows and columns of each block.
    """
    if len(rows) < _SQUARES_FROM:
        return [(slice(start, stop), slice(stop)) for start, stop in rows]
    return list(_squares([start for start, _ in rows] + [rows[-1][1]]))


def _squares(bounds: list[int]) -> Iterator[tuple[slice, slice]]:
    """The lower triangle as one square below the middle, and the same in both halves."""
    if len(bounds) == 2:
        yield slice(*bounds), slice(*bounds)
        return
    middle = len(bounds) // 2
    yield slice(bounds[middle], bounds[-1]), slice(bounds[0], bounds[middle])
    yield from _squares(bounds[: middle + 1])
    yield from _squares(bounds[middle:])


def products_of(algorithm: Algorithm, workspace: Workspace, num_threads: int) -> Products:
    """How an algorithm computes its products.

    Args:
        algorithm: The algorithm. Without Triton its kernel is replaced by full products.
        workspace: Where scratch comes from.
        num_threads: Threads of a product.

    Returns:
        The products.
    """
    if algorithm.has_kernel and importlib.util.find_spec("triton") is not None:
        from hp_muon_plugin.muon.triton_products import TritonProducts

        return TritonProducts()
    blocks = algorithm.blocks(num_threads)
    if blocks > 1 and algorithm.dtype is not FloatDtype.float32 and workspace.device.type == "cpu":
        from hp_muon_plugin.muon.half_products import HalfSymmetricProducts

        return HalfSymmetricProducts(blocks, workspace)
    if blocks > 1:
        return BlockSymmetricProducts(blocks, workspace)
    return FullProducts()
