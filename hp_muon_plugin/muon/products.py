"""Matrix products of the iteration, full or symmetric, always into given buffers.

All products here have a symmetric result: they are Gram matrices, or products of polynomials of one
Gram matrix, which commute. A symmetric product computes the lower block triangle and mirrors it,
diagonal blocks included: mirroring only some of them costs 10 to 100 times the accuracy. So does
mirroring the factors ``Q`` under some schedules (:func:`hp_muon_plugin.muon.runs.are_factors_mirrored`).

The products of small matrices are returned as operations on fixed buffers, so that a step runs them
again without building anything.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hp_muon_plugin.muon.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on fixed buffers.

    Attributes:
        function: What to call.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def run_all(operations: Iterable[Operation]) -> None:
    """Run operations in order.

    Args:
        operations: What to run.
    """
    for operation in operations:
        operation.function(*operation.args, **operation.kwargs)


class Products(Protocol):
    """The products that one algorithm uses."""

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out = X X^T`` for wide, ``X^T X`` for tall matrices, now.

        Args:
            x: ``(B, M, N)``, any strides.
            out: ``(B, m, m)`` with ``m = min(M, N)``.
        """

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """``out = linear * R + quadratic * R R`` for symmetric ``R``, ``(B, m, m)``."""

    def product(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, is_mirrored: bool = True
    ) -> list[Operation]:
        """``out = left right`` for commuting symmetric matrices, ``(B, m, m)``, mirrored or entry by entry."""


class FullProducts:
    """Every entry is computed: batched products in one call each."""

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`Products`."""
        if x.shape[1] <= x.shape[2]:
            torch.bmm(x, x.mT, out=out)
        else:
            torch.bmm(x.mT, x, out=out)

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        return [Operation(torch.baddbmm, (r, r, r), {"beta": linear, "alpha": quadratic, "out": out})]

    def product(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, is_mirrored: bool = True
    ) -> list[Operation]:
        """See :class:`Products`."""
        return [Operation(torch.bmm, (left, right), {"out": out})]


class BlockSymmetricProducts:
    """Half the work for large matrices, with ordinary products of block rows.

    With ``k`` block rows ``(k + 1) / 2k`` of a full product is computed.

    Args:
        num_blocks: Block rows.
        workspace: Where the scratch for mirroring comes from.
    """

    def __init__(self, num_blocks: int, workspace: Workspace) -> None:
        self._num_blocks = num_blocks
        self._workspace = workspace
        self._half = torch.tensor(0.5, device=workspace.device)

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See :class:`Products`."""
        is_wide = x.shape[1] <= x.shape[2]
        for start, stop in self._rows(out.shape[1]):
            if is_wide:
                torch.bmm(x[:, start:stop], x[:, :stop].mT, out=out[:, start:stop, :stop])
            else:
                torch.bmm(x[:, :, start:stop].mT, x[:, :, :stop], out=out[:, start:stop, :stop])
        run_all(self._mirror(out))

    def square(self, r: torch.Tensor, *, linear: float, quadratic: float, out: torch.Tensor) -> list[Operation]:
        """See :class:`Products`."""
        operations = []
        for start, stop in self._rows(r.shape[1]):
            args = (r[:, start:stop, :stop], r[:, start:stop], r[:, :, :stop])
            target = out[:, start:stop, :stop]
            operations.append(Operation(torch.baddbmm, args, {"beta": linear, "alpha": quadratic, "out": target}))
        return operations + self._mirror(out)

    def product(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, is_mirrored: bool = True
    ) -> list[Operation]:
        """See :class:`Products`."""
        if not is_mirrored:
            return [Operation(torch.bmm, (left, right), {"out": out})]
        operations = [
            Operation(torch.bmm, (left[:, start:stop], right[:, :, :stop]), {"out": out[:, start:stop, :stop]})
            for start, stop in self._rows(left.shape[1])
        ]
        return operations + self._mirror(out)

    def _rows(self, size: int) -> list[tuple[int, int]]:
        blocks = min(self._num_blocks, size)
        bounds = [size * block // blocks for block in range(blocks + 1)]
        return list(zip(bounds, bounds[1:], strict=False))

    def _mirror(self, out: torch.Tensor) -> list[Operation]:
        operations = []
        for start, stop in self._rows(out.shape[1]):
            if start:
                below = out[:, start:stop, :start].mT
                operations.append(Operation(out[:, :start, start:stop].copy_, (below,)))
            block = out[:, start:stop, start:stop]
            scratch = self._workspace.take("mirror", tuple(block.shape), out.dtype)
            operations.append(Operation(torch.add, (block, block.mT), {"out": scratch}))
            operations.append(Operation(torch.mul, (scratch, self._half), {"out": block}))
        return operations
