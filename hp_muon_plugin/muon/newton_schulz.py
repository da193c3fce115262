"""Newton-Schulz: polar factors of many matrices at once, by matrix products alone.

One step of the quintic iteration is ``X <- (a I + b R + c R R) X`` with ``R = X X^T``, started from
``X / ||X||_F`` (Keller Jordan, Muon, 2024). Here the steps are divided into runs. In a run the small
matrices alone are iterated (the Gram form)::

    P = a I + b R + c R R      Q <- P Q      R <- P R P

and only at its end ``Q`` is applied to ``X``. A run of one step is the standard iteration; a run of
all steps reads ``X`` three times whatever the number of steps. How long a run may be follows from the
precision (:mod:`~hp_muon_plugin.muon.precision`), and whether long runs pay from the shape
(:mod:`~hp_muon_plugin.muon.algorithm`). ``trace(R)`` is the squared norm, so normalising is free.

Matrices are grouped by their short side only, and smaller ones may join a batch: their Gram matrices
are padded with zeros, which changes nothing in their results. The input is read in place, wide or
tall, in any strides; the last product writes the result where it belongs, or updates the weight.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from hp_muon_plugin.config.choices import NonFinite
from hp_muon_plugin.muon.algorithm import Algorithm, Form
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.precision import gram_precision, ieee_float32, settings
from hp_muon_plugin.muon.prepared import Prepared, Runs, applied, prepare
from hp_muon_plugin.muon.products import products_of, run_all
from hp_muon_plugin.muon.runs import GramPrecision, segments
from hp_muon_plugin.muon.scaling import is_in_range, largest_entry, refuse_non_finite, scaled, scaled_half
from hp_muon_plugin.muon.small_matrices import SmallMatrices
from hp_muon_plugin.muon.stack import Stack, Target, chunks
from hp_muon_plugin.muon.workspace import Workspace

__all__ = ["NewtonSchulz", "Stack", "Target", "orthogonalize"]

_UNCHANGED = contextlib.nullcontext()


class NewtonSchulz:
    """The iteration with its buffers, which are taken once and used by every call.

    Args:
        coefficients: ``(a, b, c)`` of every step.
        algorithm: How to compute; see :func:`hp_muon_plugin.muon.algorithm.choose`.
        device: Where the matrices live.
        workspace: Buffers, shared with other instances that never run at the same time.
        non_finite: What a matrix with a NaN or infinite entry does. None: its polar factor is NaN. ``skip``:
            it is zero, and :attr:`num_non_finite` counts it. ``error``: GradientError, before anything
            is written; the host waits for the device.
        always_scales: Whether every matrix is scaled by a power of two before its squares are summed, or
            only after a look at the sums. None: always on accelerators, where looking makes the host
            wait.
        max_workspace_bytes: Matrices are worked on in chunks so that the small matrices of a chunk,
            ``16 B m^2`` bytes, need at most this (but at least one matrix at a time). None: 64 MiB,
            and on the CPU what stays in its cache.
    """

    def __init__(
        self,
        coefficients: Sequence[Coefficients],
        algorithm: Algorithm,
        *,
        device: torch.device,
        workspace: Workspace | None = None,
        non_finite: NonFinite | None = None,
        always_scales: bool | None = None,
        max_workspace_bytes: int | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.coefficients = tuple(coefficients)
        self._device = device
        self._workspace = workspace or Workspace(device)
        self._max_bytes = max_workspace_bytes
        self._non_finite = non_finite
        self._always_scales = device.type != "cpu" if always_scales is None else always_scales
        self._num_non_finite = torch.zeros((), dtype=torch.int64, device=device)
        self._dtype: torch.dtype = getattr(torch, algorithm.dtype)
        self._products = products_of(algorithm, self._workspace)
        self._runs: dict[GramPrecision, Runs] = {}
        self._prepared: dict[GramPrecision, dict[tuple[torch.Size, ...], Prepared]] = {}
        self._one_chunk: set[tuple[torch.Size, ...]] = set()
        self._version = self._workspace.version
        self._settings = settings(device)

    @property
    def runs(self) -> Runs:
        """The steps that one Gram matrix carries, in order, as precision is configured now."""
        return self._runs_of(self._precision())

    def _precision(self) -> GramPrecision:
        """Precision of Gram matrices, as configured now."""
        return self.algorithm.precision if self._dtype is not torch.float32 else gram_precision(self._device)

    def _runs_of(self, precision: GramPrecision) -> Runs:
        runs = self._runs.get(precision)
        if runs is None:
            is_standard = self.algorithm.form is Form.standard
            runs = tuple((row,) for row in self.coefficients) if is_standard else segments(self.coefficients, precision)
            self._runs[precision] = runs
        return runs

    @property
    def num_non_finite(self) -> int:
        """Matrices left out so far, with ``non_finite=skip``. Reading it waits for the device."""
        return int(self._num_non_finite)

    def __call__(self, stacks: Sequence[Stack]) -> None:
        """Orthogonalise all matrices and write the targets.

        A matrix that is zero gives zero. A NaN or infinite entry makes the polar factor of its own
        matrix NaN (see ``non_finite``) and touches no other. The size of the entries does not matter.

        Args:
            stacks: Matrices, best with the same short side.

        Raises:
            GradientError: With ``non_finite=error``, if a matrix has a NaN or infinite entry.
        """
        present = [stack for stack in stacks if stack.x.numel()]
        if not present:
            return
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._run_all(present)
        else:
            self._run_all(present)

    def gram(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gram matrices of matrices of one short side, not normalised.

        Gram matrices add over slices of the long side, so ranks that hold such slices all-reduce
        these ``m * m`` numbers instead of gathering the matrices.

        Args:
            xs: Each ``(B_i, M_i, N_i)`` float32, any strides.

        Returns:
            ``(sum B_i, m, m)`` float32, a new tensor.
        """
        short = min(xs[0].shape[1:])
        out = torch.empty(sum(x.shape[0] for x in xs), short, short, device=self._device)
        with self._exact():
            for x, piece in zip(xs, out.split([x.shape[0] for x in xs]), strict=True):
                run_all(self._products.gram(x, piece))
        return out

    def factor(self, gram: torch.Tensor, run: Sequence[Coefficients], *, is_first: bool) -> torch.Tensor:
        """The factors of a run from whole Gram matrices: ``O = Q X`` if it is the only one.

        Args:
            gram: ``(B, m, m)`` float32, not normalised; not changed.
            run: One of :attr:`runs`.
            is_first: Whether ``X`` is the raw input, so that the run normalises it.

        Returns:
            ``(B, m, m)`` float32, valid until the next call. For tall matrices ``O = X Q^T``.
        """
        small = SmallMatrices(gram.shape[0], gram.shape[1], self._products, self._workspace)
        small.gram.copy_(gram)
        with self._exact():
            if is_first:
                run_all((*small.normalizer.measure, small.normalizer.guard, *small.normalizer.divide))
            program = small.run_program(run, is_first=is_first)
            run_all(program.operations)
            if program.identity:
                program.complete()
        return program.q

    def _run_all(self, stacks: Sequence[Stack]) -> None:
        if self._non_finite is NonFinite.error:
            refuse_non_finite([stack.x for stack in stacks])
        with self._exact():
            precision = self._precision()
            shapes = tuple([stack.x.shape for stack in stacks])
            if shapes in self._one_chunk:
                self._run(stacks, shapes, precision)
                return
            cut = chunks(stacks, self._max_bytes, self._device)
            if len(cut) == 1:
                self._one_chunk.add(shapes)
            for chunk in cut:
                self._run(chunk, tuple([stack.x.shape for stack in chunk]), precision)

    def _run(self, chunk: Sequence[Stack], shapes: tuple[torch.Size, ...], precision: GramPrecision) -> None:
        current = [self._copied(stack, position) for position, stack in enumerate(chunk)]
        prepared = self._prepare(shapes, precision)
        self._form(current, prepared)
        current = self._normalize(current, chunk, prepared)
        run_all(prepared.first)
        program = prepared.program
        if prepared.carried:
            for x, q, out in zip(current, prepared.first_q, prepared.carried, strict=True):
                applied(x, q, out, identity=0.0)()
            run_all(prepared.rest)
            current = prepared.last
            if program.identity and any(target.keep for stack in chunk for target in stack.targets):
                program.complete()
                program = replace(program, identity=0.0)
        for stack, x, q in zip(chunk, current, prepared.q, strict=True):
            for target in stack.targets:
                self._write(target, x, q, program.identity)

    def _prepare(self, shapes: tuple[torch.Size, ...], precision: GramPrecision) -> Prepared:
        if self._version != self._workspace.version:  # prepared views keep buffers that were replaced alive
            self._prepared.clear()
        known = self._prepared.setdefault(precision, {})
        prepared = known.get(shapes)
        if prepared is None:
            prepared = prepare(shapes, self._runs_of(precision), self._products, self._workspace, self._dtype)
            known[shapes] = prepared
            self._version = self._workspace.version
        return prepared

    def _form(self, current: Sequence[torch.Tensor], prepared: Prepared) -> None:
        run_all(prepared.clear)
        for x, piece in zip(current, prepared.gram, strict=True):
            run_all(self._products.gram(x, piece))

    def _normalize(self, current: list[torch.Tensor], chunk: Sequence[Stack], prepared: Prepared) -> list[torch.Tensor]:
        normalizer = prepared.normalizer
        run_all(normalizer.measure)
        is_scaled = self._always_scales or self._dtype is not torch.float32
        if is_scaled or not is_in_range(normalizer.trace):
            if not is_scaled:
                current = [
                    self._scaled(self._cleaned(x, position), stack, position)
                    for position, (x, stack) in enumerate(zip(current, chunk, strict=True))
                ]
                self._form(current, prepared)
                run_all(normalizer.measure)
            normalizer.guard()
        run_all(normalizer.divide)
        return current

    def _write(self, target: Target, x: torch.Tensor, q: torch.Tensor, identity: float) -> None:
        left, right, addend = target.factors(x, q)
        out = target.tensor
        if out.dtype is self._dtype:
            beta = identity * target.scale
            if beta == 0.0:
                addend, beta = out, target.keep
            torch.baddbmm(addend, left, right, beta=beta, alpha=target.scale, out=out)
            return
        product = self._workspace.take("product", tuple(out.shape), self._dtype)
        torch.baddbmm(addend, left, right, beta=identity, out=product)
        if target.keep == 0.0:
            out.copy_(product.mul_(target.scale))
        else:
            out.mul_(target.keep).add_(product, alpha=target.scale)

    def _copied(self, stack: Stack, position: int) -> torch.Tensor:
        """The matrices in the type of the products and in range; themselves if they may be."""
        x = stack.x
        if self._dtype is not torch.float32:
            copy = self._workspace.take(f"copied.{position}", tuple(x.shape), self._dtype)
            scaled_half(self._cleaned(x, position), copy)
            return copy
        if x.dtype is not torch.float32:
            x = self._workspace.take(f"copied.{position}", tuple(x.shape)).copy_(x)
        return self._scaled(self._cleaned(x, position), stack, position) if self._always_scales else x

    def _scaled(self, x: torch.Tensor, stack: Stack, position: int) -> torch.Tensor:
        is_own = stack.is_scratch or x.data_ptr() != stack.x.data_ptr()
        return scaled(x, x if is_own else self._workspace.take(f"scaled.{position}", tuple(x.shape)))

    def _cleaned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """With ``non_finite=skip``: a copy in which bad matrices are zero, and counted."""
        if self._non_finite is not NonFinite.skip:
            return x
        is_bad = largest_entry(x.float()).isfinite().logical_not_()
        self._num_non_finite.add_(is_bad.sum())
        copy = self._workspace.take(f"cleaned.{position}", tuple(x.shape), x.dtype)
        return copy.copy_(x).masked_fill_(is_bad, 0.0)

    def _exact(self) -> contextlib.AbstractContextManager[None]:
        if all(setting.is_ieee() for setting in self._settings):
            return _UNCHANGED
        return ieee_float32(self._settings)


@torch.no_grad()
def orthogonalize(x: torch.Tensor, engine: NewtonSchulz, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Polar factors of a stack of matrices.

    Args:
        x: ``(B, M, N)`` or ``(M, N)``, floating point, any strides; not changed.
        engine: The iteration.
        out: Where the result goes; None makes a new tensor.

    Returns:
        Tensor of the shape and type of ``x``.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    stack, target = (x, result) if x.dim() == 3 else (x[None], result[None])
    engine([Stack(stack, (Target(target, 0, stack.shape[0]),))])
    return result
