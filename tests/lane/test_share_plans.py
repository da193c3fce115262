"""The dry run plans what ranks will plan: equal digests, name by name and cut by cut."""

from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Strategy
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon, MuonRates
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.models.gpt_specs import gpt_specs, stage_specs
from hp_muon_plugin.models.muon_shares import stage_shares
from hp_muon_plugin.models.replica_plans import ddp_replica_plans
from hp_muon_plugin.models.shard_plan import plan_shards
from hp_muon_plugin.muon.distributed.replica_plan import ReplicaPlan
from hp_muon_plugin.muon.routing import Algorithm, route_parameters
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, mla, moe, train_config

RATES = MuonRates(flops_per_s=1e9, bytes_per_s=1e9, message_s=1e-6)
CASES = {
    "dense": (dense(num_layers=3), 4, Topology(), HpFsdp()),
    "dense-tp2": (dense(), 4, Topology(tp=2), HpFsdp()),
    "dense-pp2": (dense(), 4, Topology(pp=2), HpFsdp()),
    "moe": (moe(), 4, Topology(), HpFsdp()),
    "moe-ep2": (moe(), 4, Topology(ep=2), HpFsdp()),
    "replicate": (dense(), 4, Topology(), HpFsdp(replicas=2)),
    "replicate-moe": (moe(), 4, Topology(), HpFsdp(replicas=2)),
    "shard": (dense(num_layers=5), 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.shard)),
    "broadcast": (mla(), 4, Topology(ep=2), HpFsdp(replicas=2, outer=OuterMode.broadcast, outer_bucket_mib=0.01)),
}


def _digests(launch: Launch, model: Model, topology: Topology, dp: HpFsdp, options: HpMuon) -> Any:
    ready = build(launch, train_config(model, topology, dp=dp, optimizer=options, global_batch=8))
    plans = ready.optimizer.optimizer.share_plans if hasattr(ready.optimizer, "optimizer") else ()
    return {(plan.axis, plan.digest()) for plan in plans}, [line for plan in plans for line in plan.lines()]


IN_EVERY_LANE = ("dense-tp2", "moe-ep2", "shard")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_LANE else pytest.param(name, marks=pytest.mark.once) for name in CASES]
)
@pytest.mark.parametrize(
    "options",
    [HpMuon(rates=RATES), pytest.param(HpMuon(strategy=Strategy.alltoall), marks=pytest.mark.once)],
    ids=["auto", "alltoall"],
)
def test_digests_are_equal(name: str, options: HpMuon) -> None:
    model, ranks, topology, dp = CASES[name]
    config = train_config(model, topology, dp=dp, optimizer=options, global_batch=8)
    specs = gpt_specs(model, topology, 128, options)
    muon = [route.spec for route in route_parameters(specs) if route.algorithm is Algorithm.muon]
    wanted: set[tuple[str, str]] = set()
    lines: list[str] = []
    for stage in range(topology.pp):
        shares = stage_shares(config, plan_shards(config, specs, ranks, stage=stage), muon, ranks)
        wanted |= {(share.plan.axis, share.plan.digest()) for share in shares.shares if share.plan.params}
        lines += [line for share in shares.shares for line in share.plan.lines()]
    found: set[tuple[str, str]] = set()
    for digests, told in run_ranks(ranks, _digests, model, topology, dp, options):
        unplanned = [line for line in told if line not in lines and "local_experts" not in line]
        assert not unplanned[:1]
        found |= digests
    missing = wanted - found
    assert wanted
    assert not missing


def _replica_plans(launch: Launch, model: Model, topology: Topology, options: HpMuon) -> Any:
    ready = build(launch, train_config(model, topology, optimizer=options, global_batch=8))
    return [_summary(plan) for plan in ready.optimizer.optimizer.replica_plans]


def _summary(plan: ReplicaPlan) -> Any:
    """Who updates what: sizes of items, which are enough where parameters lie in another order."""
    owned = [sorted((item.numel, item.spec.shape) for item in plan.owned(place)) for place in range(plan.size)]
    return plan.axis, plan.size, owned, sorted(item.numel for item in plan.everywhere), sorted(plan.loads)


@pytest.mark.parametrize(
    ("model", "ranks", "topology", "divide"),
    [
        pytest.param(dense(num_layers=3), 3, Topology(), True, marks=pytest.mark.once),
        pytest.param(dense(), 4, Topology(tp=2), True, marks=pytest.mark.once),
        (moe(), 4, Topology(ep=2), None),
    ],
    ids=["dense", "dense-tp2", "moe-ep2"],
)
def test_ranks_with_the_same_weights_divide_them_as_planned(
    model: Model, ranks: int, topology: Topology, divide: bool | None
) -> None:
    options = HpMuon(divide_replicas=divide)
    config = train_config(model, topology, optimizer=options, global_batch=8)
    specs = gpt_specs(model, topology, 128, options)
    held = stage_specs(specs, model, topology, stage=0, ep=0)
    muon = [route.spec for route in route_parameters(held) if route.algorithm is Algorithm.muon]
    wanted = [_summary(plan) for plan in ddp_replica_plans(config, muon, ranks)]
    assert wanted
    for found in run_ranks(ranks, _replica_plans, model, topology, options):
        assert found == wanted
