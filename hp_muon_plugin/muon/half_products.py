"""Symmetric products in half precision on the CPU.

oneDNN multiplies bfloat16 there. It reads operands that are contiguous or the transpose of such; anything
else torch copies first, at the price of a product. Rows of one matrix are contiguous, so are their
transposes, and columns of a symmetric matrix are the transpose of its rows: blocks are cut that way, matrix
by matrix, and nothing is copied.
"""

import torch

from hp_muon_plugin.muon.products import BlockSymmetricProducts, Operation, block_rows
from hp_muon_plugin.muon.workspace import Workspace


class HalfSymmetricProducts(BlockSymmetricProducts):
    """Products of block rows, one matrix at a time.

    Args:
        num_blocks: Block rows.
        workspace: Where the scratch for mirroring comes from.
    """

    turns_tall = True

    def __init__(self, num_blocks: int, workspace: Workspace) -> None:
        super().__init__(num_blocks, workspace)
        self._half = torch.tensor(0.5, dtype=torch.bfloat16)

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        y = x if x.shape[1] == out.shape[1] else x.mT
        operations = []
        for matrix, result in zip(y, out, strict=True):
            for rows, cols in self._blocks(out.shape[1]):
                operations.append(Operation(torch.mm, matrix[rows], matrix[cols].mT, out=result[rows, cols]))
            operations += self._mirror(result)
        return operations

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        operations = []
        for matrix, result in zip(r, out, strict=True):
            for rows, cols in self._blocks(r.shape[1]):
                args = (matrix[rows, cols], matrix[rows], matrix[cols].mT)
                operations.append(Operation(torch.addmm, *args, beta=linear, alpha=quadratic, out=result[rows, cols]))
            operations += self._mirror(result)
        return operations

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
        for first, second, added, result in zip(left, right, addend, out, strict=True):
            for rows, cols in self._blocks(out.shape[1]):
                args = (added[rows, cols], first[rows], second[cols].mT)
                operations.append(Operation(torch.addmm, *args, beta=factor, out=result[rows, cols]))
            operations += self._mirror(result)
        return operations

    def _mirror(self, out: torch.Tensor) -> list[Operation]:
        """Transposing and adding are two calls: together they take three times as long in half precision."""
        operations = []
        for start, stop in block_rows(out.shape[0], self._num_blocks):
            if start:
                operations.append(Operation(out[:start, start:stop].copy_, out[start:stop, :start].mT))
            block = out[start:stop, start:stop]
            scratch = self._workspace.take("mirror", tuple(block.shape), out.dtype)
            operations.append(Operation(scratch.copy_, block.mT))
            operations.append(Operation(torch.add, block, scratch, out=scratch))
            operations.append(Operation(torch.mul, scratch, self._half, out=block))
        return operations
