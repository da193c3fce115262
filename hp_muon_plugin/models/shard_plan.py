"""How HP-FSDP lays a model out on a pipeline stage, from options alone: no torch, no process group.

A test on every lane compares it with what the engine really builds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hp_muon_plugin.config.choices import FloatDtype, OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.dp_checks import expert_data_parallel_size
from hp_muon_plugin.config.topology_checks import data_parallel_size
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.bucket import BucketLayout, Piece, round_up
from hp_muon_plugin.layout.per_param import plan_layouts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.granularity import ROOT, atom_of, local_shape, unit_of
from hp_muon_plugin.models.gpt_specs import stage_specs

_SLOT_ALIGNMENT = 256  # bytes, as in fsdp/buffers.py


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket of a unit.

    Attributes:
        layout: Where parameters lie.
        is_expert: Whether it lies on the expert-data-parallel ranks.
    """

    layout: BucketLayout
    is_expert: bool


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit of a pipeline stage.

    Attributes:
        name: Its module.
        buckets: Its buckets.
    """

    name: str
    buckets: tuple[PlannedBucket, ...]

    def gathered_bytes(self, itemsize: int) -> int:
        """Bytes of gathered weights; none where one rank holds all."""
        sharded = [bucket.layout.numel for bucket in self.buckets if bucket.layout.num_shards > 1]
        return sum(round_up(numel * itemsize, _SLOT_ALIGNMENT) for numel in sharded)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The layout of one pipeline stage and expert-parallel rank.

    Attributes:
        options: Options.
        units: In the order of the model, the root first.
        weight_bytes: Per gathered number.
        num_micro_batches: Per step.
    """

    options: HpFsdp
    units: tuple[PlannedUnit, ...]
    weight_bytes: int
    num_micro_batches: int

    @property
    def buckets(self) -> tuple[PlannedBucket, ...]:
        """All buckets."""
        return tuple(bucket for unit in self.units for bucket in unit.buckets)

    @property
    def padding_share(self) -> float:
        """Padding as a share of all buffers."""
        return sum(b.layout.padding for b in self.buckets) / sum(b.layout.numel for b in self.buckets)

    @property
    def grad_bytes(self) -> int:
        """Per reduced number."""
        return 4 if self.options.reduce_dtype is FloatDtype.float32 else 2

    @property
    def peak_gathered_bytes(self) -> int:
        """Memory of gathered weights: what stays gathered, and ``prefetch + 1`` places that other units share."""
        sizes = [unit.gathered_bytes(self.weight_bytes) for unit in self.units]
        if self.options.reshard_after_forward is False:
            return sum(sizes)
        count = self.options.prefetch + 1
        return sizes[0] + sum(max(sizes[1:][place::count], default=0) for place in range(count))

    def shard_traffic(self) -> tuple[float, float]:
        """Bytes of weights and of gradients that arrive at a rank from its shard group in a step."""
        weights = grads = 0.0
        for unit in self.units:
            for bucket in unit.buckets:
                others = bucket.layout.numel - bucket.layout.shard_numel
                weights += others * self.weight_bytes * self.num_gathers(unit) * self.num_micro_batches
                grads += others * self.grad_bytes * self.num_reductions
        return weights, grads

    def replica_traffic(self) -> tuple[float, float]:
        """The same from other replicas, which hold the same shard; on average over ranks."""
        replicas, outer = self.options.replicas, self.options.outer
        part = sum(bucket.layout.shard_numel for bucket in self.buckets) * (replicas - 1) / replicas
        weights = 0.0 if outer is OuterMode.replicate else part * self.weight_bytes
        return weights, part * self.grad_bytes * (1 if outer is OuterMode.shard else 2)

    @property
    def num_reductions(self) -> int:
        """Reductions of each gradient over its shard group in a step."""
        return self.num_micro_batches if self.options.shard_accumulated else 1

    def num_gathers(self, unit: PlannedUnit) -> int:
        """Gathers of a unit in a micro-batch: forward, and backward where it was given up in between.

        Args:
            unit: One of the plan.
        """
        kept = [self.units[0], *self.units[1:][-(self.options.prefetch + 1) :]]
        return 1 if self.options.reshard_after_forward is False or unit in kept else 2


def plan_shards(config: Train, specs: list[ParamSpec], world_size: int, *, stage: int) -> ShardPlan:
    """Lay a pipeline stage out.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        specs: The whole model's, from ``gpt_specs``.
        world_size: Ranks.
        stage: Pipeline stage.

    Returns:
        The plan of the stage's first expert-parallel rank; the others' are equal.
    """
    dp, topology, run = config.dp, config.topology, config.run
    assert isinstance(dp, HpFsdp)
    ranks = data_parallel_size(topology, world_size)
    shards = {False: ranks // dp.replicas, True: expert_data_parallel_size(topology, world_size) // dp.replicas}
    members: dict[str, list[ParamSpec]] = {ROOT: []}
    for spec in stage_specs(specs, config.model, topology, stage=stage, ep=0):
        members.setdefault(unit_of(spec.name, is_tied=config.model.tie_embeddings), []).append(spec)
    units = tuple(PlannedUnit(name, tuple(_buckets(held, shards, dp))) for name, held in members.items() if held)
    itemsize = 2 if config.platform.precision is Precision.bf16 else 4
    return ShardPlan(dp, units, itemsize, run.global_batch_size // (run.micro_batch_size * ranks))


def _buckets(specs: list[ParamSpec], shards: dict[bool, int], dp: HpFsdp) -> Iterator[PlannedBucket]:
    for is_expert, size in shards.items():
        pieces = [
            Piece(spec.name, local_shape(spec), *atom_of(spec, local_shape(spec)))
            for spec in specs
            if spec.is_expert == is_expert
        ]
        for layout in plan_layouts(pieces, size, dp.shard_layout, max_padding=dp.max_padding):
            yield PlannedBucket(layout, is_expert)
