"""Stages whose matrices stay where they are: ranks hold slices, and sum Gram matrices.

A rank with the slice ``X_s`` of a wide matrix that is cut along its columns has ``X_s X_s^T``; the sum
over ranks is the Gram matrix of the whole one. From it every rank iterates the factor ``Q``, the same
to the last bit, and ``Q X_s`` is its slice of the result. Tall matrices cut along their rows: transposed.

Squares must stay inside float32, and the power of two by which slices are divided for that must be the
same on all ranks: they gather the exponents of their largest entries first. An infinite or NaN entry
has the largest exponent of all, and makes the whole matrix NaN on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.layout.cut import Cut
from hp_muon_plugin.muon.batches import Family, FusedBatch, PlannedPart
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz
from hp_muon_plugin.muon.precision import ieee_float32, settings
from hp_muon_plugin.muon.scaling import divide_by_power, exponent_bits
from hp_muon_plugin.muon.stage import Stage
from hp_muon_plugin.muon.stage_tools import StageTools, Steps, apply_updates
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.spans import NEWTON_SCHULZ, span
from hp_muon_plugin.platform.wire import wait_for

_Present = tuple[Family, list[PlannedPart]]


@dataclass(slots=True)
class _Slices:
    """This rank's slices of matrices of one shape.

    Attributes:
        parts: What takes part of the family.
        current: ``(B, rows, cols)`` float32.
        other: As large; the next ``current``.
        is_wide: Whether Gram matrices are ``X X^T``.
    """

    parts: list[PlannedPart]
    current: torch.Tensor
    other: torch.Tensor
    is_wide: bool

    @property
    def rows_first(self) -> torch.Tensor:
        """``(B, m, n)``: with the side that no rank divides first."""
        return self.current if self.is_wide else self.current.mT

    def apply(self, q: torch.Tensor) -> None:
        """``X <- Q X``, or ``X Q^T``: the accurate ones, see :class:`RunProgram`."""
        left, right = (q, self.current) if self.is_wide else (self.current, q.mT)
        torch.bmm(left, right, out=self.other)
        self.current, self.other = self.other, self.current


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch with buffers.

    Attributes:
        slices: By family.
        engine: The iteration.
        gram: ``(B, m, m)``, in the stage's message.
    """

    slices: list[_Slices]
    engine: NewtonSchulz
    gram: torch.Tensor

    def form(self) -> None:
        """Gram matrices of the slices."""
        for each, out in zip(self.slices, self._divided(self.gram), strict=True):
            self.engine.gram([each.rows_first], out=out)

    def advance(self, run: Sequence[Coefficients], *, is_first: bool) -> None:
        """Apply the factors of a run, the Gram matrices being those of the whole matrices.

        Args:
            run: Its steps.
            is_first: Whether it normalises.
        """
        factors = self.engine.factor(self.gram, run, is_first=is_first)
        for each, q in zip(self.slices, self._divided(factors), strict=True):
            each.apply(q)

    def _divided(self, small: torch.Tensor) -> Sequence[torch.Tensor]:
        divided: Sequence[torch.Tensor] = small.split([each.current.shape[0] for each in self.slices])
        return divided


def run_summed(tools: StageTools, stage: Stage, steps: Steps, axis: AxisGroup) -> None:
    """One stage: exponents, then for each run of the iteration sum, iterate, apply.

    Args:
        tools: What stages share.
        stage: A stage that goes ``gram``.
        steps: Of all pieces; None for those that are left alone, the same on every rank of the axis.
        axis: The axis.
    """
    work = [(batch, _present(batch, steps)) for batch in stage.batches]
    work = [(batch, families) for batch, families in work if families]
    if not work:
        return
    batches = _load(tools, work, steps)
    message = tools.workspace.take("gram_message", (sum(batch.gram.numel() for batch in batches),))
    every = [each for batch in batches for each in batch.slices]
    _scale(tools, every, axis)
    with ieee_float32(settings(tools.device)):
        for number, run in enumerate(batches[0].engine.runs):
            with span(NEWTON_SCHULZ):
                for batch in batches:
                    batch.form()
            # all-reduce over the axis: the Gram matrices of all matrices of the stage; the host waits
            wait_for([tools.wire.all_reduce(message, axis)], "sum of Gram matrices over {}", axis.axis)
            with span(NEWTON_SCHULZ):
                for batch in batches:
                    batch.advance(run, is_first=number == 0)
    _apply(tools, every, steps)
    tools.num_orthogonalized += sum(each.current.shape[0] for each in every)


def _load(tools: StageTools, work: Sequence[tuple[FusedBatch, list[_Present]]], steps: Steps) -> list[_Batch]:
    """Buffers of all batches, with the slices in them; Gram matrices lie one batch after another."""
    counts = [sum(part.count for _, parts in families for part in parts) for _, families in work]
    sizes = [count * batch.short**2 for count, (batch, _) in zip(counts, work, strict=True)]
    message = tools.workspace.take("gram_message", (sum(sizes),))
    loaded = []
    for number, ((batch, families), gram) in enumerate(zip(work, message.split(sizes), strict=True)):
        slices = [_loaded(tools, f"{number}.{place}.", *family, steps) for place, family in enumerate(families)]
        loaded.append(_Batch(slices, tools.engine(batch.algorithm), gram.view(-1, batch.short, batch.short)))
    return loaded


def _present(batch: FusedBatch, steps: Steps) -> list[_Present]:
    found = [(family, [part for part in family.parts if steps[part.piece] is not None]) for family in batch.families]
    return [(family, parts) for family, parts in found if parts]


def _loaded(tools: StageTools, name: str, family: Family, parts: list[PlannedPart], steps: Steps) -> _Slices:
    """Look-ahead momenta of the slices of one shape."""
    current, other = (tools.buffer(f"slices{name}", number, family, parts) for number in range(2))
    first = 0
    for part in parts:
        step = steps[part.piece]
        assert step is not None
        target = tools.factored(current[first : first + part.count], part)
        tools.write_update(target, tools.part(step.grad, part), tools.part(step.momentum, part), step.beta)
        first += part.count
    return _Slices(parts, current, other, family.cut is Cut.cols)


def _scale(tools: StageTools, every: list[_Slices], axis: AxisGroup) -> None:
    """Divide every matrix by the same power of two on all ranks."""
    counts = [each.current.shape[0] for each in every]
    own = tools.workspace.take("exponents", (sum(counts),), torch.int32)
    gathered = tools.workspace.take("all_exponents", (axis.size * own.numel(),), torch.int32)
    for each, out in zip(every, own.split(counts), strict=True):
        out.copy_(exponent_bits(each.current).flatten())
    # all-gather over the axis: one int32 for each matrix; the host waits
    wait_for([tools.wire.all_gather(gathered, own, axis)], "exchange of exponents over {}", axis.axis)
    largest = gathered.view(axis.size, -1).amax(0)  # positive floats are ordered as their bits are
    for each, bits in zip(every, largest.split(counts), strict=True):
        divide_by_power(each.current, bits.view(-1, 1, 1), each.current)


def _apply(tools: StageTools, every: list[_Slices], steps: Steps) -> None:
    weights, decays, updates, factors = [], [], [], []
    for each in every:
        first = 0
        for part in each.parts:
            step = steps[part.piece]
            assert step is not None
            updates.append(tools.factored(each.current[first : first + part.count], part))
            weights.append(tools.part(step.weight, part))
            decays.append(step.decay)
            factors.append(-step.lr * part.scale)
            first += part.count
    apply_updates(weights, decays, updates, factors)
