"""What ``optimizer.divide_replicas`` does, as text for the dry run: who updates what, and what is sent for it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hp_muon_plugin.cli.figures import gflop, mib, ms, rates_text, ratio, yes_no_null
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.models.muon_shares import device_of
from hp_muon_plugin.models.replica_plans import ddp_replica_plans
from hp_muon_plugin.muon.distributed.footprint import Footprint
from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.replica_plan import ReplicaPlan
from hp_muon_plugin.muon.table import matrices_text

_MOST_RANKS = 8


def replica_lines(config: Train, held: Sequence[ParamSpec], world_size: int) -> list[str]:
    """How data-parallel ranks that all hold the same weights divide the matrices.

    Args:
        config: Checked options with Megatron's DistributedDataParallel and ``optimizer=hp_muon``.
        held: The parameters that Muon takes, of one pipeline stage and expert-parallel rank.
        world_size: Ranks.

    Returns:
        Lines; none where no other rank holds the same weights.
    """
    options = config.optimizer
    assert isinstance(options, HpMuon)
    plans = ddp_replica_plans(config, held, world_size)
    if not plans:
        return []
    lines = [
        f"  ranks that hold the same weights, optimizer.divide_replicas={yes_no_null(options.divide_replicas)}, "
        f"planned for {device_of(config)}:",
        f"    all ms are at {rates_text(plans[0].rates)}",
    ]
    for plan in plans:
        lines += [f"    {text}" for text in _plan_lines(plan)]
    footprint = Footprint(options, device_of(config))
    for plan in plans:
        footprint.add_replicas(plan, _busiest(plan))
    return [*lines, f"    buffers of a rank with most work of each kind: {mib(footprint.nbytes)}"]


def _plan_lines(plan: ReplicaPlan) -> Iterator[str]:
    what = "routed experts" if plan.axis.startswith("expert") else "weights"
    yield f"{what} over {plan.axis}, {plan.size} ranks:"
    if plan.everywhere:
        yield f"  updated by every rank, nothing is sent: {_items_text(plan.everywhere)}"
    if plan.divided:
        yield f"  updated by one rank, which sends the new weight: {_items_text(plan.divided)}"
        for place in range(min(plan.size, _MOST_RANKS)):
            yield f"    rank {place}: {_items_text(plan.owned(place)) or 'nothing'}"
        if plan.size > _MOST_RANKS:
            yield f"    and {plan.size - _MOST_RANKS} more ranks"
    mean = sum(plan.loads) / plan.size
    whole = plan.undivided_flops
    yield (
        f"  owners: {gflop(max(plan.loads))} at most, {gflop(mean)} on average, "
        f"max/mean {ratio(max(plan.loads), mean)}; undivided {gflop(whole)} on every rank"
    )
    arriving = plan.most_received_bytes
    saved = (whole - max(plan.loads)) / plan.rates.flops
    sending = arriving / plan.rates.from_replicas + plan.num_messages * plan.rates.message_s
    yield (
        f"  arriving at the rank with most: {plan.num_messages} broadcast {mib(arriving)} (0 undivided); "
        f"{ms(saved)} ms less to compute, {ms(sending)} ms to send"
    )


def _items_text(items: Sequence[Item]) -> str:
    counts = Counter(matrices_text(item.spec.view) for item in items)
    return ", ".join(f"{count} x {text}" for text, count in sorted(counts.items()))


def _busiest(plan: ReplicaPlan) -> int:
    return max(range(plan.size), key=lambda place: plan.loads[place])
