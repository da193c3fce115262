"""The plan of a Muon step: from specs alone, before any tensor or process group exists.

The same specs give the same plan on every rank. A plan lists stages; a stage is a set of
parameters that are made whole together (by one all-gather, or without communication) and the fused
Newton-Schulz batches over their matrices. The distributed strategies extend this object.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.algorithm import TABLE, Algorithm, Rule, choose, load_table, padded_short
from hp_muon_plugin.muon.coefficients import Coefficients, resolve_schedule
from hp_muon_plugin.muon.scale import update_scale

_FLOAT_BYTES = 4
# What is made whole by one all-gather, and the matrices that a batch holds at once. On the CPU a batch
# stays in the last-level cache between being written and being read.
_STAGE_BYTES = 256 << 20
_BATCH_BYTES = {"cpu": 8 << 20}


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The matrices of one part of one parameter.

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


@dataclass(frozen=True, slots=True)
class Family:
    """Matrices of one shape, side by side in one buffer.

    Attributes:
        rows: Rows of each.
        cols: Columns of each.
        parts: What is in it, in buffer order.
    """

    rows: int
    cols: int
    parts: tuple[PlannedPart, ...]

    @property
    def count(self) -> int:
        """Matrices."""
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, float32."""
        return _FLOAT_BYTES * self.count * self.rows * self.cols


@dataclass(frozen=True, slots=True)
class FusedBatch:
    """Matrices orthogonalised at once: long sides, wide and tall mixed.

    Attributes:
        short: Their short side, or the side to which smaller ones are padded.
        algorithm: How.
        families: By shape.
    """

    short: int
    algorithm: Algorithm
    families: tuple[Family, ...]

    @property
    def count(self) -> int:
        """Matrices in the batch."""
        return sum(family.count for family in self.families)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices, float32."""
        return sum(family.nbytes for family in self.families)

    def flops(self, run_lengths: Sequence[int]) -> int:
        """Floating-point operations.

        Args:
            run_lengths: Steps of each run of the batch's algorithm.

        Returns:
            The sum over all matrices.
        """
        return sum(
            family.count
            * self.algorithm.flops(
                min(family.rows, family.cols), max(family.rows, family.cols), run_lengths, padded=self.short
            )
            for family in self.families
        )


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
        """Newton-Schulz operations of this rank in a step, with float32 Gram matrices."""
        return sum(batch.flops(self.run_lengths(batch)) for stage in self.stages for batch in stage.batches)

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

    def run_lengths(self, batch: FusedBatch) -> tuple[int, ...]:
        """Steps of each run of a batch, with IEEE float32 Gram matrices.

        Args:
            batch: One of the plan's.

        Returns:
            Lengths; they sum to the number of steps.
        """
        return batch.algorithm.run_lengths(self.coefficients)


def build_plan(
    specs: Sequence[ParamSpec],
    config: HpMuon,
    *,
    device: str = "cpu",
    table: Sequence[Rule] | None = None,
    max_stage_bytes: int = _STAGE_BYTES,
    max_batch_bytes: int | None = None,
) -> MuonPlan:
    """Plan a step over the Muon parameters of one rank.

    Args:
        specs: The parameters that Muon updates and this rank holds, in the optimizer's order.
        config: Options.
        device: ``cpu``, ``cuda`` or ``npu``; decides algorithms and batch sizes.
        table: Which algorithm is fastest for which shape; None for ``config.ns_table`` or the
            built-in one.
        max_stage_bytes: Largest size of what one all-gather makes whole; a single larger parameter
            gets a stage of its own.
        max_batch_bytes: Largest size of the matrices of a batch, None for the device's default; a
            single larger part gets a batch of its own.

    Returns:
        The plan; equal input gives an equal plan.
    """
    if table is None:
        table = load_table(Path(config.ns_table)) if config.ns_table else TABLE
    limit = _BATCH_BYTES.get(device, _STAGE_BYTES) if max_batch_bytes is None else max_batch_bytes
    stages = []
    for axis in sorted({_axis(spec) for spec in specs}):
        members = [i for i, spec in enumerate(specs) if _axis(spec) == axis]
        for chunk in _chunks(members, specs, max_stage_bytes if axis else None):
            parts = [part for member in chunk for part in _planned_parts(member, specs[member], config)]
            batches = _batches(parts, device, table, limit, config.ns_dtype)
            split = specs[chunk[0]].split if axis else None
            local = sum(specs[member].local_numel for member in chunk)
            stages.append(Stage(axis or None, split.size if split else 1, tuple(chunk), local, tuple(batches)))
    coefficients = resolve_schedule(config.schedule, steps=config.steps, custom=config.coefficients)
    return MuonPlan(tuple(specs), tuple(stages), coefficients)


def _axis(spec: ParamSpec) -> str:
    return spec.split.axis if spec.split else ""


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


def _planned_parts(member: int, spec: ParamSpec, config: HpMuon) -> list[PlannedPart]:
    assert spec.view is not None, spec
    planned = []
    for index, part in enumerate(spec.view.parts):
        count, rows, cols = spec.view.part_shape(part)
        if count and rows and cols:
            scale = update_scale(config.scale, rows, cols, factor=config.scale_factor)
            planned.append(PlannedPart(member, index, count, rows, cols, scale))
    return planned


def _batches(
    parts: list[PlannedPart], device: str, table: Sequence[Rule], limit: int, dtype: FloatDtype | None
) -> list[FusedBatch]:
    groups: dict[tuple[int, Algorithm], list[PlannedPart]] = {}
    for part in parts:
        short, long = min(part.rows, part.cols), max(part.rows, part.cols)
        algorithm = choose(device, short, long, table=table)
        if dtype is not None:
            algorithm = replace(algorithm, dtype=dtype)
        groups.setdefault((padded_short(device, algorithm, short, long), algorithm), []).append(part)
    batches = []
    for (short, algorithm), members in sorted(groups.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        members.sort(key=lambda part: (part.rows, part.cols))
        taken: list[PlannedPart] = []
        for part in members:
            if taken and _FLOAT_BYTES * sum(p.count * p.rows * p.cols for p in (*taken, part)) > limit:
                batches.append(_fused(short, algorithm, taken))
                taken = []
            taken.append(part)
        batches.append(_fused(short, algorithm, taken))
    return batches


def _fused(short: int, algorithm: Algorithm, parts: Sequence[PlannedPart]) -> FusedBatch:
    shapes = sorted({(part.rows, part.cols) for part in parts})
    families = [Family(*shape, tuple(p for p in parts if (p.rows, p.cols) == shape)) for shape in shapes]
    return FusedBatch(short, algorithm, tuple(families))
