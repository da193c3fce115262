"""The distributed Muon step as text, for the dry run."""

import os
from collections.abc import Iterator, Sequence

from hp_muon_plugin.cli.figures import gflop, mib, ms, rates_text, ratio, yes_no_null
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.models.muon_shares import PlannedShare, StageShares, device_of, stage_shares
from hp_muon_plugin.models.shard_plan import ShardPlan
from hp_muon_plugin.models.shard_topology import links
from hp_muon_plugin.muon.distributed.footprint import Footprint
from hp_muon_plugin.muon.distributed.plan import UNDER_WAY
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.muon.table import matrices_text


def muon_lines(config: Train, shards: Sequence[ShardPlan], specs: Sequence[ParamSpec], world_size: int) -> list[str]:
    """The Muon step of the pipeline stage whose busiest rank has most to do.

    Args:
        config: Checked options with ``dp=hp_fsdp`` and ``optimizer=hp_muon``.
        shards: Layout of every pipeline stage.
        specs: The parameters that Muon takes, of the whole model.
        world_size: Ranks.

    Returns:
        Lines.
    """
    stages = [stage_shares(config, plan, specs, world_size) for plan in shards]
    number, stage = max(enumerate(stages), key=lambda numbered: max(numbered[1].loads))
    if not stage.kinds:
        return ["Muon step: no matrices"]
    replicas = config.dp.replicas
    divided = any(share.replica for share in stage.shares)
    rates = stage.kinds[0][0].plan.rates
    assert isinstance(config.optimizer, HpMuon)
    divide = yes_no_null(config.optimizer.divide_replicas)
    lines = [
        f"Muon step of pipeline stage {number}{f', all {replicas} replicas together' if divided else ''}, "
        f"planned for {device_of(config)}:",
        f"  all ms are at {rates_text(rates)}",
    ]
    if replicas > 1 and not divided:
        lines.append(
            f"  each of the {replicas} replicas updates all of it (dp.outer=replicate, "
            f"optimizer.divide_replicas={divide}); nothing is sent for that"
        )
    link = links(config, world_size, os.environ)
    between = links(config, world_size, os.environ, between_replicas=True)
    for kind in stage.kinds:
        lines += [f"  {text}" for text in _kind_lines(stage, kind, link[kind[0].is_expert])]
        if kind[0].sent:
            lines.append(
                f"    {kind[0].sent.num_weights} of its parameters are updated by one replica each and sent over the "
                f"{between[kind[0].is_expert]} link (dp.outer=replicate, optimizer.divide_replicas={divide})"
            )
    if config.optimizer.overlap_backward:
        lines.append(f"  {_early_text(stage)} (optimizer.overlap_backward)")
    return [*lines, *_rank_lines(config, stage, rates)]


def _early_text(stage: StageShares) -> str:
    """What may begin before the step; one axis only, as all use the same buffers."""
    for shares in stage.kinds:
        batches = max(len(share.plan.batches) for share in shares)
        if batches:
            axis = shares[0].plan.axis
            return f"exchanges over {axis} that begin while backward runs: {min(UNDER_WAY, batches)} of {batches}"
    return "nothing is exchanged that could begin while backward runs"


def _kind_lines(stage: StageShares, shares: Sequence[PlannedShare], link: str) -> Iterator[str]:
    plan = shares[0].plan
    what = "routed experts" if shares[0].is_expert else "weights"
    yield f"{what} over {plan.axis}, {plan.size} ranks, {link} link:"
    for count, matrices in _whole(shares):
        yield f"  {count} x {matrices}: whole on a rank, nothing is sent"
    for (matrices, route, refusal), (count, priced) in _cut(shares).items():
        yield f"  {count} x {matrices}: {route}{f', not gram: {refusal}' if refusal else ''}"
        yield f"    ms: {', '.join(priced)}"
    loads = [load for share in shares for load in share.plan.loads]
    mean = sum(loads) / len(loads)
    yield f"  owners: {gflop(max(loads))} at most, {gflop(mean)} on average, max/mean {ratio(max(loads), mean)}"
    yield f"  arriving at the rank with most: {_arriving_text(stage, shares)}"
    peers = max(share.plan.most_peers for share in shares)
    if peers:
        yield f"  all-to-all peers (queue pairs) of the rank with most: {peers}"


def _whole(shares: Sequence[PlannedShare]) -> Iterator[tuple[int, str]]:
    """Items that nobody shares, by kind."""
    counts: dict[str, int] = {}
    for share in shares:
        cut = {index for choice in share.plan.choices for index in choice.items}
        for index, item in enumerate(share.plan.items):
            if index not in cut:
                text = matrices_text(item.spec.view)
                counts[text] = counts.get(text, 0) + 1
    for text, count in counts.items():
        yield count, text


def _cut(shares: Sequence[PlannedShare]) -> dict[tuple[str, str, str], tuple[int, list[str]]]:
    """Items that ranks share, by kind, route and why it is not the one asked for, with the prices of all routes."""
    found: dict[tuple[str, str, str], tuple[int, list[str]]] = {}
    for share in shares:
        for choice in share.plan.choices:
            seconds = {name: price.seconds(share.plan.rates) for name, price in choice.prices}
            priced = [f"{name} {ms(seconds[name])}" for name in sorted(seconds, key=lambda name: seconds[name])]
            key = matrices_text(share.plan.items[choice.items[0]].spec.view), str(choice.route), choice.refusal
            count, first = found.get(key, (0, priced))
            found[key] = count + len(choice.items), first
    return found


def _arriving_text(stage: StageShares, shares: Sequence[PlannedShare]) -> str:
    every = [told for share in shares for told in stage.arriving(share)]
    most = max(every, key=lambda told: told.num_bytes)
    counts = [f"{number} {name} {mib(num_bytes)}" for name, (number, num_bytes) in most.by_name.items()]
    return ", ".join(counts) or "nothing"


def _rank_lines(config: Train, stage: StageShares, rates: Rates) -> list[str]:
    assert isinstance(config.optimizer, HpMuon)
    loads = stage.loads
    mean = sum(loads) / len(loads)
    busiest = max(range(stage.ranks), key=lambda rank: loads[rank])
    footprint = Footprint(config.optimizer, device_of(config))
    for shares in stage.kinds:
        share, place = stage.share_of(shares, busiest)
        footprint.add_plan(share.plan, place)
        footprint.add_sent(share.sent.packed(place))
    times = [stage.seconds(rank) for rank in range(stage.ranks)]
    apart, together = max(map(sum, times)), max(map(max, times))
    return [
        f"  all ranks: {gflop(max(loads))} of Newton-Schulz at most, {gflop(mean)} on average, "
        f"max/mean {ratio(max(loads), mean)}",
        f"  buffers of the rank with most work: {mib(footprint.nbytes)}",
        f"  prediction at these rates: {ms(apart)} ms a step if nothing overlaps, {ms(together)} ms if all does",
    ]
