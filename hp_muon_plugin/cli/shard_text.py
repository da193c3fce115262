"""The layout of HP-FSDP as text, for the dry run."""

import os
from collections.abc import Sequence
from itertools import groupby

from hp_muon_plugin.cli.figures import mib
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.models.shard_plan import PlannedBucket, PlannedUnit, ShardPlan, plan_shards
from hp_muon_plugin.models.shard_topology import crossing_errors


def stage_plans(config: Train, specs: list[ParamSpec], world_size: int) -> list[ShardPlan]:
    """The layout of every pipeline stage.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        specs: The whole model's.
        world_size: Ranks.

    Returns:
        Plans.
    """
    return [plan_shards(config, specs, world_size, stage=stage) for stage in range(config.topology.pp)]


def shard_lines(config: Train, plans: Sequence[ShardPlan], world_size: int) -> list[str]:
    """The layout of the pipeline stage that gathers most.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        plans: Of every pipeline stage.
        world_size: Ranks.

    Returns:
        Lines.
    """
    busiest, plan = _busiest(plans)
    lines = [f"shards     of a rank of pipeline stage {busiest}: {_total(plan)}"]
    lines += [f"  {text}" for text in _unit_lines(plan)]
    weights, grads = plan.shard_traffic()
    lines.append(f"  arriving per step from the shard group: {mib(weights)} of weights, {mib(grads)} of gradients")
    if plan.options.replicas > 1:
        weights, grads = plan.replica_traffic()
        lines.append(f"  arriving per step from other replicas: {mib(weights)} of weights, {mib(grads)} of gradients")
    lines.append(f"  gathered weights take {mib(plan.peak_gathered_bytes)} at most")
    lines += [f"  warning: {error}" for error in crossing_errors(config, plan, world_size, os.environ)]
    return lines


def _busiest(plans: Sequence[ShardPlan]) -> tuple[int, ShardPlan]:
    """The pipeline stage that gathers most, and its plan."""
    return max(enumerate(plans), key=lambda numbered: numbered[1].shard_traffic())


def crossing_lines(config: Train, specs: list[ParamSpec], world_size: int) -> list[str]:
    """Warnings for a run whose shard groups leave their supernode.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        specs: The whole model's.
        world_size: Ranks.

    Returns:
        One line for each kind of shard group that does.
    """
    _, plan = _busiest(stage_plans(config, specs, world_size))
    return [str(error) for error in crossing_errors(config, plan, world_size, os.environ)]


def _total(plan: ShardPlan) -> str:
    own = sum(bucket.layout.shard_numel for bucket in plan.buckets)
    return (
        f"{len(plan.units)} units, {len(plan.buckets)} buckets, {own:,} elements, padding {plan.padding_share:.2%}; "
        f"{plan.options.replicas} replicas, outer={plan.options.outer}"
    )


def _unit_lines(plan: ShardPlan) -> list[str]:
    """Neighbouring units of equal layout in one line."""
    lines = []
    for text, run in groupby(plan.units, key=_unit_text):
        names = [unit.name for unit in run]
        lines.append(f"{names[0]}{f' .. {names[-1]}' if len(names) > 1 else ''}: {text}")
    return lines


def _unit_text(unit: PlannedUnit) -> str:
    return ", ".join(_bucket_text(bucket) for bucket in unit.buckets)


def _bucket_text(bucket: PlannedBucket) -> str:
    kind, layout = "experts" if bucket.is_expert else "dense", bucket.layout
    return f"{kind} {layout.num_shards} x {layout.shard_numel:,} (padding {layout.padding_share:.2%})"
