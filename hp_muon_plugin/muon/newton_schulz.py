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

from collections.abc import Sequence
from dataclasses import replace

import torch

from hp_muon_plugin.config.choices import NonFinite
from hp_muon_plugin.muon.algorithm import Algorithm, Form, is_gathered
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.gathering import Place, gathered, is_returned
from hp_muon_plugin.muon.inputs import Inputs
from hp_muon_plugin.muon.precision import gram_precision, ieee_float32, settings
from hp_muon_plugin.muon.prepared import Prepared, Runs, applied, prepare
from hp_muon_plugin.muon.products import Products, products_of, run_all
from hp_muon_plugin.muon.runs import GramPrecision, segments
from hp_muon_plugin.muon.scaling import is_in_range, refuse_non_finite
from hp_muon_plugin.muon.small_matrices import SmallMatrices
from hp_muon_plugin.muon.stack import Stack, Target, chunks
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.muon.writing import write, write_turned

__all__ = ["NewtonSchulz", "Stack", "Target", "orthogonalize"]

# Precision, number of threads (chunks and copies depend on it), and shapes.
_Key = tuple[float | int | torch.Size, ...]
_ALONE = Place()


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
        self._dtype: torch.dtype = getattr(torch, algorithm.dtype)
        if always_scales is None:
            always_scales = device.type != "cpu"
        self._inputs = Inputs(self._workspace, self._dtype, non_finite, always_scales=always_scales)
        self._products_by_threads: dict[int, Products] = {}
        self._runs: dict[GramPrecision, Runs] = {}
        self._prepared: dict[_Key, Prepared] = {}
        self._version = self._workspace.version
        self._settings = settings(device)

    @property
    def runs(self) -> Runs:
        """The steps that one Gram matrix carries, in order, as precision is configured now."""
        return self._runs_of(self._precision())

    @property
    def _products(self) -> Products:
        """How products are computed with the threads that there are now."""
        threads = torch.get_num_threads()
        if threads not in self._products_by_threads:
            self._products_by_threads[threads] = products_of(self.algorithm, self._workspace, threads)
        return self._products_by_threads[threads]

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
        return int(self._inputs.num_non_finite)

    def __call__(self, stacks: Sequence[Stack]) -> None:
        """Orthogonalise all matrices and write the targets.

        A matrix that is zero gives zero. A NaN or infinite entry makes the polar factor of its own
        matrix NaN (see ``non_finite``) and touches no other. The size of the entries does not matter.

        Args:
            stacks: Matrices, best with the same short side.

        Raises:
            GradientError: With ``non_finite=error``, if a matrix has a NaN or infinite entry.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._run_all(stacks)
        else:
            self._run_all(stacks)

    def gram(self, xs: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gram matrices of matrices of one short side, not normalised.

        They add over slices of the long side: ranks all-reduce ``m * m`` numbers, and gather nothing.

        Args:
            xs: Each ``(B_i, M_i, N_i)`` float32, any strides.
            out: ``(sum B_i, m, m)`` float32. None: new, ``m`` the short side. ``m`` rows: of ``X X^T``.

        Returns:
            ``out``.
        """
        if out is None:
            short = min(xs[0].shape[1:])
            out = torch.empty(sum(x.shape[0] for x in xs), short, short, device=self._device)
        with ieee_float32(self._settings):
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
        with ieee_float32(self._settings):
            if is_first:
                run_all((*small.normalizer.measure, small.normalizer.guard, *small.normalizer.divide))
            program = small.run_program(run, is_first=is_first)
            run_all(program.operations)
            if program.identity:
                program.complete()
        return program.q

    def _run_all(self, stacks: Sequence[Stack]) -> None:
        if self._non_finite is NonFinite.error:
            refuse_non_finite([stack.x for stack in stacks if stack.x.numel()])
        if all([setting.is_ieee() for setting in self._settings]):
            self._run_in_chunks(stacks, self.algorithm.precision)
            return
        with ieee_float32(self._settings):
            self._run_in_chunks(stacks, self._precision())

    def _run_in_chunks(self, stacks: Sequence[Stack], precision: GramPrecision) -> None:
        known = self._known(stacks, precision)
        if known is not None:  # these shapes once were one chunk
            self._run(stacks, known)
            return
        present = [stack for stack in stacks if stack.x.numel()]
        itemsize = self._dtype.itemsize
        for chunk in chunks(present, self._max_bytes, self._device, itemsize=itemsize) if present else ():
            self._run(chunk, self._known(chunk, precision) or self._prepare(chunk, precision))

    def _known(self, chunk: Sequence[Stack], precision: GramPrecision) -> Prepared | None:
        self._drop_outdated()
        return self._prepared.get(_key(chunk, precision))

    def _prepare(self, chunk: Sequence[Stack], precision: GramPrecision) -> Prepared:
        shapes = [_shape(stack, is_turned=self._products.turns_tall) for stack in chunk]
        threads = torch.get_num_threads()
        apart = [is_gathered(self._device.type, *shape[1:], num_threads=threads) for shape in shapes]
        prepared = prepare(shapes, apart, self._runs_of(precision), self._products, self._workspace, self._dtype)
        self._drop_outdated()
        self._prepared[_key(chunk, precision)] = prepared
        return prepared

    def _drop_outdated(self) -> None:
        """Forget what was prepared on buffers that were replaced since: it would keep them alive."""
        if self._version != self._workspace.version:
            self._prepared.clear()
            self._version = self._workspace.version

    def _run(self, chunk: Sequence[Stack], prepared: Prepared) -> None:
        current = self._inputs.read(chunk, are_turned=self._products.turns_tall)
        if prepared.places:
            current = gathered(current, prepared.places)
        self._form(current, prepared)
        current = self._normalize(current, chunk, prepared)
        program = prepared.program
        if prepared.carried:
            for x, q, out in zip(current, prepared.first_q, prepared.carried, strict=True):
                applied(x, q, out, identity=0.0)()
            run_all(prepared.rest)
            current = prepared.last
            if program.identity and any(target.keep for stack in chunk for target in stack.targets):
                program.complete()
                program = replace(program, identity=0.0)
        first = 0
        for place in prepared.places or [_ALONE] * len(chunk):
            members = range(first, first + place.count)
            first += place.count
            if place.count > 1 and not program.identity and is_returned(place, [chunk[index] for index in members]):
                continue
            for index in members:
                for target in chunk[index].targets:
                    is_turned = current[index].shape[1:] != chunk[index].x.shape[1:]
                    put = write_turned if is_turned else write
                    put(target, current[index], prepared.q[index], program.identity, self._workspace)

    def _form(self, current: Sequence[torch.Tensor], prepared: Prepared) -> None:
        run_all(prepared.clear)
        products = self._products
        for x, piece in zip(current, prepared.gram, strict=True):
            run_all(products.gram(x, piece))

    def _normalize(self, current: list[torch.Tensor], chunk: Sequence[Stack], prepared: Prepared) -> list[torch.Tensor]:
        normalizer = prepared.normalizer
        run_all(normalizer.measure)
        if self._inputs.are_scaled or not is_in_range(normalizer.trace):
            if not self._inputs.are_scaled:
                current = self._inputs.rescaled(current, chunk)
                self._form(current, prepared)
                run_all(normalizer.measure)
            normalizer.guard()
        run_all(prepared.first)
        return current


def _shape(stack: Stack, *, is_turned: bool) -> torch.Size:
    count, rows, cols = stack.x.shape
    return torch.Size((count, cols, rows)) if is_turned and rows > cols else stack.x.shape


def _key(chunk: Sequence[Stack], precision: GramPrecision) -> _Key:
    return (precision.unit, torch.get_num_threads(), *[stack.x.shape for stack in chunk])


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
