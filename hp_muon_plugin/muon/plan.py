"""The plan of a Muon step: from specs alone, before any tensor or process group exists.

The same specs give the same plan on every rank. A plan lists stages; a stage is a set of
parameters that are made whole together (by one all-gather, or without communication) and the fused
Newton-Schulz batches over their matrices. The distributed strategies extend this object.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.coefficients import Coefficients, resolve_schedule
from hp_muon_plugin.muon.scale import update_scale

DEFAULT_STAGE_BYTES = 256 * 1024 * 1024
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The matrices of one part of one parameter, and where they stand in their batch.

    Attributes:
        param: Index into ``MuonPlan.params``.
        part: Index into the parameter's ``view.parts``.
        count: Number of matrices.
        rows: Logical rows.
        cols: Logical columns.
        scale: Factor of the update, from the logical shape.
    """

    param: int
    part: int
    count: int
    rows: int
    cols: int
    scale: float

    @property
    def is_transposed(self) -> bool:
        """Whether the matrices are tall and enter the batch transposed."""
        return self.rows > self.cols


@dataclass(frozen=True, slots=True)
class FusedBatch:
    """Matrices of equal short and long side, wide and tall together, orthogonalised at once.

    Attributes:
        short: Short side.
        long: Long side.
        parts: What is in it, in batch order.
    """

    short: int
    long: int
    parts: tuple[PlannedPart, ...]

    @property
    def count(self) -> int:
        """Matrices in the batch."""
        return sum(part.count for part in self.parts)

    def flops(self, steps: int) -> int:
        """Floating-point operations of the standard iteration: ``steps * (4 m^2 n + 2 m^3)`` each."""
        short, long = self.short, self.long
        return self.count * steps * (4 * short * short * long + 2 * short**3)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the two iterates and two Gram-sized buffers in float32."""
        return _FLOAT_BYTES * self.count * 2 * (self.short * self.long + self.short**2)


@dataclass(frozen=True, slots=True)
class Stage:
    """Parameters that are made whole together, and their batches.

    Attributes:
        axis: Mesh axis of the all-gather, or None where every rank holds whole parameters.
        size: Ranks on the axis (1 without an axis).
        params: Indices into ``MuonPlan.params``, in the order of the message.
        local_numel: Elements that each rank sends.
        batches: Fused batches.
    """

    axis: str | None
    size: int
    params: tuple[int, ...]
    local_numel: int
    batches: tuple[FusedBatch, ...]

    @property
    def received_bytes(self) -> int:
        """Bytes that each rank receives from the others in the all-gather (float32)."""
        return _FLOAT_BYTES * self.local_numel * (self.size - 1)


@dataclass(frozen=True, slots=True)
class MuonPlan:
    """What a Muon step does on this rank.

    Attributes:
        params: The Muon parameters that this rank holds (its part of).
        stages: In execution order.
        coefficients: Newton-Schulz coefficients of every step.
    """

    params: tuple[ParamSpec, ...]
    stages: tuple[Stage, ...]
    coefficients: tuple[Coefficients, ...]

    @property
    def num_matrices(self) -> int:
        """Matrices that this rank orthogonalises."""
        return sum(batch.count for stage in self.stages for batch in stage.batches)

    @property
    def flops(self) -> int:
        """Newton-Schulz operations of this rank in a step."""
        return sum(batch.flops(len(self.coefficients)) for stage in self.stages for batch in stage.batches)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in a step."""
        return sum(stage.received_bytes for stage in self.stages)

    def state_bytes(self, momentum_bytes: int = _FLOAT_BYTES) -> int:
        """Optimizer state of the Muon parameters on this rank: one momentum, no second moment.

        Args:
            momentum_bytes: Bytes of one momentum element.

        Returns:
            Bytes.
        """
        return momentum_bytes * sum(spec.local_numel for spec in self.params)


def build_plan(specs: Sequence[ParamSpec], config: HpMuon, *, max_stage_bytes: int = DEFAULT_STAGE_BYTES) -> MuonPlan:
    """Plan a step over the Muon parameters of one rank.

    Args:
        specs: The parameters that Muon updates and this rank holds, in the optimizer's order.
        config: Options.
        max_stage_bytes: Largest size of what a stage makes whole, and of a batch's workspace; a
            single larger parameter gets a stage of its own.

    Returns:
        The plan; equal input gives an equal plan.
    """
    stages = []
    for axis in sorted({spec.split.axis if spec.split else "" for spec in specs}):
        members = [i for i, spec in enumerate(specs) if (spec.split.axis if spec.split else "") == axis]
        limit = max_stage_bytes if axis else None
        for chunk in _chunks(members, specs, limit):
            stages.append(_stage(chunk, specs, config, axis or None, max_stage_bytes))
    coefficients = resolve_schedule(config.schedule, steps=config.steps, custom=config.coefficients)
    return MuonPlan(tuple(specs), tuple(stages), coefficients)


def _chunks(members: list[int], specs: Sequence[ParamSpec], limit: int | None) -> list[list[int]]:
    chunks: list[list[int]] = []
    used = 0
    for member in members:
        size = _FLOAT_BYTES * specs[member].numel
        if not chunks or (limit is not None and used + size > limit):
            chunks.append([])
            used = 0
        chunks[-1].append(member)
        used += size
    return chunks


def _stage(members: list[int], specs: Sequence[ParamSpec], config: HpMuon, axis: str | None, max_bytes: int) -> Stage:
    by_shape: dict[tuple[int, int], list[PlannedPart]] = {}
    for member in members:
        view = specs[member].view
        assert view is not None, specs[member]
        for index, part in enumerate(view.parts):
            count, rows, cols = view.part_shape(part)
            if math.prod((count, rows, cols)) == 0:
                continue
            scale = update_scale(config.scale, rows, cols, factor=config.scale_factor)
            planned = PlannedPart(member, index, count, rows, cols, scale)
            by_shape.setdefault((min(rows, cols), max(rows, cols)), []).append(planned)
    batches = [batch for shape, parts in sorted(by_shape.items()) for batch in _split_batch(shape, parts, max_bytes)]
    split = specs[members[0]].split if axis else None
    local = sum(specs[member].local_numel for member in members)
    return Stage(axis, split.size if split else 1, tuple(members), local, tuple(batches))


def _split_batch(shape: tuple[int, int], parts: list[PlannedPart], max_bytes: int) -> list[FusedBatch]:
    batches: list[list[PlannedPart]] = [[]]
    for part in parts:
        grown = FusedBatch(*shape, (*batches[-1], part))
        if batches[-1] and grown.workspace_bytes > max_bytes:
            batches.append([])
        batches[-1].append(part)
    return [FusedBatch(*shape, tuple(batch)) for batch in batches]
