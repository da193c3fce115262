"""Whether shard groups stay inside supernodes, and what it costs if they do not."""

from collections.abc import Iterator, Mapping, Sequence

from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.topology import Topology, discover
from hp_muon_plugin.models.shard_plan import ShardPlan


def crossing_errors(
    config: Train, plan: ShardPlan, world_size: int, environ: Mapping[str, str]
) -> Iterator[ConfigError]:
    """Shard groups that leave their supernode; training works, but every unit waits for the slow link.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        plan: Of a pipeline stage.
        world_size: Ranks.
        environ: The environment, from which supernodes are discovered.

    Yields:
        At most one for dense parameters and one for routed experts, with the bytes and a fix.

    Raises:
        ConfigError: If the sources of the topology contradict each other or the job.
    """
    known = discover(world_size, environ, ranks_per_supernode=config.topology.ranks_per_supernode)
    for is_expert in sorted({bucket.is_expert for bucket in plan.buckets}):
        num_bytes = _whole_bytes(plan, is_expert=is_expert)
        for ranks in shard_groups(config, world_size, is_expert=is_expert):
            error = _check(known, ranks, num_bytes, is_expert=is_expert)
            if error is not None:
                yield error
                break


def links(
    config: Train, world_size: int, environ: Mapping[str, str], *, between_replicas: bool = False
) -> dict[bool, str]:
    """The slowest link between ranks of a shard group.

    Args:
        config: Checked options with ``dp=hp_fsdp``.
        world_size: Ranks.
        environ: The environment, from which supernodes are discovered.
        between_replicas: Between ranks that hold the same shards instead.

    Returns:
        ``fast`` inside supernodes, ``slow`` between them; for dense weights (False) and routed experts (True).

    Raises:
        ConfigError: If the sources of the topology contradict each other or the job.
    """
    known = discover(world_size, environ, ranks_per_supernode=config.topology.ranks_per_supernode)
    found = {}
    for is_expert in (False, True):
        groups = shard_groups(config, world_size, is_expert=is_expert, between_replicas=between_replicas)
        found[is_expert] = "slow" if any(len(known.supernodes(ranks)) > 1 for ranks in groups) else "fast"
    return found


def _check(known: Topology, ranks: Sequence[int], num_bytes: int, *, is_expert: bool) -> ConfigError | None:
    kind = "expert-data-parallel" if is_expert else "data-parallel"
    return known.check_shard_group(f"dp.replicas ({kind} shards)", ranks, num_bytes)


def _whole_bytes(plan: ShardPlan, *, is_expert: bool) -> int:
    """Bytes of whole buffers that are gathered and reduced in a step."""
    total = 0.0
    for unit in plan.units:
        numel = sum(bucket.layout.numel for bucket in unit.buckets if bucket.is_expert is is_expert)
        gathered = plan.num_gathers(unit) * plan.num_micro_batches * plan.weight_bytes
        total += numel * (gathered + plan.num_reductions * plan.grad_bytes)
    return round(total)


def shard_groups(
    config: Train, world_size: int, *, is_expert: bool, between_replicas: bool = False
) -> Iterator[list[int]]:
    """The shard groups of the job, in Megatron's order of ranks: tensor, (expert,) data, pipeline.

    Args:
        config: Options.
        world_size: Ranks.
        is_expert: Those of routed experts.
        between_replicas: The ranks that hold the same shards instead.

    Yields:
        Global ranks of each group.
    """
    assert isinstance(config.dp, HpFsdp)
    topology = config.topology
    inner = topology.ep * topology.etp if is_expert else topology.tp
    per_stage = world_size // topology.pp
    size = per_stage // inner // config.dp.replicas
    for first in range(0, world_size, per_stage):
        for place in range(inner):
            ranks = range(first + place, first + per_stage, inner)
            if between_replicas:
                yield from (list(ranks[start::size]) for start in range(size))
            else:
                yield from (list(ranks[start : start + size]) for start in range(0, len(ranks), size))
