"""The plan of a Muon step: from specs alone, before any tensor or process group exists.

The same specs give the same plan on every rank. A plan lists pieces (a parameter, or a part of one
that goes its own way) and stages; a stage is a set of pieces that are orthogonalised together in one
way, and the fused Newton-Schulz batches over their matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.algorithm import Rule
from hp_muon_plugin.muon.balance import divide
from hp_muon_plugin.muon.batches import FLOAT_BYTES, Family, FusedBatch, PlannedPart, fused_batches
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.pieces import Piece, Router, Way
from hp_muon_plugin.muon.rates import rates_of
from hp_muon_plugin.muon.stability import schedule_and_table
from hp_muon_plugin.muon.stage import PlannedCollective, Stage

__all__ = ["Family", "FusedBatch", "MuonPlan", "PlannedCollective", "PlannedPart", "Stage", "build_plan"]

# What one stage makes whole or sums, and the matrices that a batch holds at once. On the CPU a batch
# stays in the last-level cache between being written and being read.
_STAGE_BYTES = 256 << 20
_BATCH_BYTES = {"cpu": 8 << 20}


@dataclass(frozen=True, slots=True)
class MuonPlan:
    """What a Muon step does on this rank.

    Attributes:
        params: The Muon parameters that this rank holds (its part of).
        pieces: What they are divided into.
        stages: In execution order.
        coefficients: Newton-Schulz coefficients of every step.
    """

    params: tuple[ParamSpec, ...]
    pieces: tuple[Piece, ...]
    stages: tuple[Stage, ...]
    coefficients: tuple[Coefficients, ...]

    @property
    def num_matrices(self) -> int:
        """Matrices that a rank orthogonalises, or takes part in; the most of any rank."""
        return self._busiest(lambda stage, index: sum(batch.count for batch in stage.batches_of(index)))

    @property
    def flops(self) -> int:
        """Newton-Schulz operations in a step with float32 Gram matrices; the most of any rank."""
        return self._busiest(self.flops_of)

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank receives in a step; the most of any rank."""
        return self._busiest(lambda stage, index: stage.received_bytes_of(index))

    def flops_of(self, stage: Stage, index: int) -> int:
        """Newton-Schulz operations of one rank in one stage.

        Args:
            stage: One of the plan's.
            index: The rank's place on the stage's axis.

        Returns:
            Operations, with IEEE float32 Gram matrices.
        """
        return sum(batch.flops(self.run_lengths(batch)) for batch in stage.batches_of(index))

    def _busiest(self, measure: Callable[[Stage, int], int]) -> int:
        """The largest sum over stages that a place on each axis has."""
        total = 0
        for axis in {stage.axis for stage in self.stages}:
            stages = [stage for stage in self.stages if stage.axis == axis]
            places = range(max(stage.size for stage in stages))
            total += max(sum(measure(stage, index) for stage in stages) for index in places)
        return total

    def state_bytes(self, momentum_bytes: int = FLOAT_BYTES) -> int:
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
        max_stage_bytes: Largest size of what the ranks of an axis make whole or sum in one stage; a
            single larger piece gets a stage of its own.
        max_batch_bytes: Largest size of the matrices of a batch, None for the device's default; a
            single larger part gets a batch of its own.

    Returns:
        The plan; equal input gives an equal plan.
    """
    coefficients, table = schedule_and_table(config, table)
    limit = _BATCH_BYTES.get(device, _STAGE_BYTES) if max_batch_bytes is None else max_batch_bytes
    router = Router(config.tp_mode, device, table, coefficients, rates_of(config.rates, device))
    pieces = tuple(piece for param, spec in enumerate(specs) for piece in router.pieces(param, spec))
    builder = _StageBuilder(config, device, table, coefficients, limit, max_stage_bytes, pieces)
    ways = sorted({(piece.axis or "", piece.way) for piece in pieces})
    stages = [stage for axis, way in ways for stage in builder.stages(axis or None, way)]
    return MuonPlan(tuple(specs), pieces, tuple(stages), coefficients)


@dataclass(frozen=True, slots=True)
class _StageBuilder:
    """What all stages of a plan have in common."""

    config: HpMuon
    device: str
    table: Sequence[Rule]
    coefficients: Sequence[Coefficients]
    max_batch_bytes: int
    max_stage_bytes: int
    pieces: Sequence[Piece]

    def stages(self, axis: str | None, way: Way) -> list[Stage]:
        """The stages of all pieces that go one way."""
        members = [i for i, piece in enumerate(self.pieces) if (piece.axis, piece.way) == (axis, way)]
        if way is Way.owner:  # neighbours cost about the same, so that each stage can be balanced
            members.sort(key=lambda index: (-self._flops(index), index))
        loads = [0] * self.pieces[members[0]].num_slices
        return [self._stage(chunk, axis, way, loads) for chunk in self._chunks(members, axis)]

    def _stage(self, chunk: list[int], axis: str | None, way: Way, loads: list[int]) -> Stage:
        size = self.pieces[chunk[0]].num_slices if axis else 1
        numels = tuple(self.pieces[index].spec.local_numel for index in chunk)
        if way is Way.owner:
            costs = [self._flops(index) for index in chunk]
            # ranks wait for each other at the end of a stage, so work of earlier stages only breaks ties: that
            # single jobs do not all go to the first rank
            ties = sorted(range(size), key=lambda rank: (loads[rank], rank))
            owners = divide(costs, size, preferred=[ties] * len(costs)).owners
            for owner, cost in zip(owners, costs, strict=True):
                loads[owner] += cost
            batches = [
                batch
                for owner in range(size)
                for batch in self._batches([i for i, o in zip(chunk, owners, strict=True) if o == owner], owner)
            ]
            return Stage(way, axis, size, tuple(chunk), numels, tuple(batches), owners)
        batches = self._batches(chunk)
        runs = {len(batch.algorithm.run_lengths(self.coefficients)) for batch in batches}
        num_runs = max(runs) if way is Way.gram and runs else 1
        return Stage(way, axis, size, tuple(chunk), numels, tuple(batches), num_runs=num_runs)

    def _batches(self, members: Sequence[int], owner: int | None = None) -> list[FusedBatch]:
        parts = [part for index in members for part in self.pieces[index].planned_parts(index, self.config)]
        return fused_batches(parts, self.device, self.table, self.max_batch_bytes, self.config.ns_dtype, owner=owner)

    def _flops(self, index: int) -> int:
        return sum(batch.flops(batch.algorithm.run_lengths(self.coefficients)) for batch in self._batches([index]))

    def _chunks(self, members: list[int], axis: str | None) -> list[list[int]]:
        chunks: list[list[int]] = []
        used = 0
        for member in members:
            size = self._stage_bytes(member)
            if not chunks or (axis is not None and used + size > self.max_stage_bytes):
                chunks.append([])
                used = 0
            chunks[-1].append(member)
            used += size
        return chunks

    def _stage_bytes(self, index: int) -> int:
        """What a piece adds to the largest buffers of its stage."""
        piece = self.pieces[index]
        numel = piece.spec.numel
        if piece.way is Way.gram:
            numel += sum(part.count * part.gram_side**2 for part in piece.planned_parts(index, self.config))
        return FLOAT_BYTES * numel
