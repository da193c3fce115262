"""The part of the iteration that works on small matrices, as a program over fixed buffers.

Everything between the Gram matrices and the factors ``Q`` depends only on how many matrices there
are and on their short side. So it is written down once, as a list of calls, and run at every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.products import Operation, Products
from hp_muon_plugin.muon.runs import are_factors_mirrored
from hp_muon_plugin.muon.workspace import Workspace


@dataclass(frozen=True, slots=True)
class RunProgram:
    """From the Gram matrices of one run to its factors ``identity * I + q``.

    Attributes:
        operations: Calls, in order; the Gram matrices are used as scratch.
        q: ``(B, m, m)``, holds the factors afterwards, each a product with the latest step on the left:
            ``Q X`` is accurate, ``X Q`` is not, ``X Q^T`` is. Valid until another program runs.
        identity: What is missing on the diagonal of ``q``: it costs less to add ``X`` to a product.
        complete: Adds it.
    """

    operations: tuple[Operation, ...]
    q: torch.Tensor
    identity: float
    complete: Operation


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Trace of the Gram matrices and what normalises with it.

    Attributes:
        trace: ``(B,)``, receives the squared Frobenius norms.
        measure: Computes the traces.
        guard: Makes the trace of zero matrices 1: divided by less, factors would be infinite in float16.
        divide: Divides the Gram matrices by them and prepares the factor for ``Q``.
        root: ``(B, 1, 1)``, ``1 / sqrt(trace)`` after ``divide``.
    """

    trace: torch.Tensor
    measure: tuple[Operation, ...]
    guard: Operation
    divide: tuple[Operation, ...]
    root: torch.Tensor


class SmallMatrices:
    """Buffers and programs for ``B`` small matrices.

    Four buffers of ``(B, m, m)`` are used, ``16 B m^2`` bytes in float32; two if every run has one step. Then
    there is room to keep their rows from lying a power of two apart, which makes mirroring slow. Products
    that mirror nothing are faster without: 3 % at 128. So are those in half precision on the CPU, which want
    contiguous matrices; there the four take half as much, and in bfloat16 a float32 buffer half as much again.

    Args:
        count: ``B``.
        short: ``m``.
        products: How products are computed.
        workspace: Where the buffers come from.
        dtype: Their type.
        longest_run: Steps of the longest run.
    """

    def __init__(
        self,
        count: int,
        short: int,
        products: Products,
        workspace: Workspace,
        dtype: torch.dtype = torch.float32,
        *,
        longest_run: int = 2,
    ) -> None:
        shape = (count, short, short)
        is_padded = longest_run == 1 and products.is_mirroring and dtype is torch.float32
        take = workspace.take_padded if is_padded else workspace.take
        self.gram = take("gram", shape, dtype)
        self._another = partial(take, "another", shape, dtype)
        self._products = products
        self._spare = [take(f"small{i}", shape, dtype) for i in range(1 if longest_run == 1 else 3)]
        # An addend is free on a device. On the CPU it is copied first, and the m numbers of a diagonal are
        # fewer; half precision would lose bits of them.
        self._keeps_identity_apart = workspace.device.type != "cpu" or dtype is not torch.float32
        is_widened = workspace.device.type == "cpu" and dtype is torch.bfloat16
        self._widened = workspace.take("widened", shape) if is_widened else None
        self.normalizer = self._normalizer(workspace, count)

    def two_grams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """:attr:`gram` and another buffer like it, for programs that take turns.

        A square matrix then needs no buffer of its own between runs of one step: once the factors of a run
        are known, its Gram matrices may be overwritten with the matrices, and the next run uses the
        other buffer. Three buffers stay in the cache instead of four.

        Returns:
            Two buffers, ``(B, m, m)`` each.
        """
        return self.gram, self._another()

    def run_program(
        self, run: Sequence[Coefficients], *, is_first: bool, gram: torch.Tensor | None = None
    ) -> RunProgram:
        """The program of one run.

        Args:
            run: ``(a, b, c)`` of its steps.
            is_first: Whether the Gram matrices are those of the raw input, already divided by their
                traces, so that the factors are scaled by ``1 / sqrt(trace)``.
            gram: ``(B, m, m)``, where the Gram matrices are; None for :attr:`gram`.

        Returns:
            The program; it uses the Gram matrices as scratch.
        """
        spare, products = list(self._spare), self._products
        gram = self.gram if gram is None else gram
        operations: list[Operation] = []
        is_mirrored = are_factors_mirrored(run)
        is_apart = len(run) == 1 and not is_first and self._keeps_identity_apart
        q: torch.Tensor | None = None
        for step, row in enumerate(run):
            a = row[0]
            z = spare.pop()  # b R + c R R, so that P = a I + Z is never formed
            operations += self._without_identity(row, gram, z)
            if step < len(run) - 1:
                half = spare.pop()
                operations += products.product(z, gram, gram, factor=a, out=half)
                operations += products.product(half, z, half, factor=a, out=gram)
                spare.append(half)
            if q is None:
                q = z
                complete = Operation(q.diagonal(dim1=-2, dim2=-1).add_, _scalar(a, q))
                if not is_apart:
                    operations.append(complete)
            else:
                grown = spare.pop()
                operations += products.product(z, q, q, factor=a, out=grown, is_mirrored=is_mirrored)
                spare += [z, q]
                q = grown
        assert q is not None, "a run has at least one step"
        if is_first:
            operations += self._changed("mul_", q, self.normalizer.root)
        return RunProgram(tuple(operations), q, run[0][0] if is_apart else 0.0, complete)

    def _changed(self, method: str, matrices: torch.Tensor, by: torch.Tensor) -> list[Operation]:
        """Divide or multiply matrices in place by a float32 number each.

        On the CPU torch would widen those in bfloat16 in a temporary copy at every call. (float16 is emulated there
        and used in tests alone.)
        """
        if self._widened is None:
            return [Operation(getattr(matrices, method), by)]
        return [
            Operation(self._widened.copy_, matrices),
            Operation(getattr(self._widened, method), by),
            Operation(matrices.copy_, self._widened),
        ]

    def _without_identity(self, row: Coefficients, gram: torch.Tensor, out: torch.Tensor) -> list[Operation]:
        """``out = b R + c R R``."""
        _, b, c = row
        if c == 0.0:
            return [Operation(torch.mul, gram, _scalar(b, out), out=out)]
        return self._products.square(gram, linear=b, quadratic=c, out=out)

    def _normalizer(self, workspace: Workspace, count: int) -> Normalizer:
        trace = workspace.take("trace", (count,))
        root = workspace.take("root", (count, 1, 1))
        diagonal = self.gram.diagonal(dim1=-2, dim2=-1)
        column = trace.view(count, 1, 1)
        return Normalizer(
            trace,
            (Operation(torch.sum, diagonal, dim=-1, dtype=torch.float32, out=trace),),
            Operation(torch.threshold_, trace, torch.finfo(torch.float32).tiny, 1.0),
            (*self._changed("div_", self.gram, column), Operation(torch.rsqrt, column, out=root)),
            root,
        )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor: a Python number would be turned into one at every use."""
    return torch.tensor(value, device=like.device)
