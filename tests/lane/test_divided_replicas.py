"""HP-HSDP with outer=replicate: replicas divide the matrices, and end with the weights that each would compute."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision, Strategy
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Checkpoint, Model, Topology, Train
from hp_muon_plugin.models.gpt_specs import gpt_specs
from hp_muon_plugin.models.muon_shares import stage_shares
from hp_muon_plugin.models.shard_plan import plan_shards
from hp_muon_plugin.muon.distributed.footprint import Footprint
from hp_muon_plugin.muon.routing import Algorithm, route_parameters
from hp_muon_plugin.platform.wire import Collective
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, moe, train, train_config, whole_weights
from lane.resuming import run
from lane.test_fsdp_parity import STEPS, TOLERANCE, reference, relative

HSDP = HpFsdp(replicas=2, outer=OuterMode.replicate)
EP, TP = Topology(ep=2), Topology(tp=2, sequence_parallel=True)


def _options(divide: bool | None, **values: Any) -> HpMuon:
    return HpMuon(lr=5e-3, weight_decay=0.1, strategy=Strategy.alltoall, divide_replicas=divide, **values)


def _trained(launch: Launch, model: Model, topology: Topology, divide: bool, precision: Precision) -> Any:
    config = train_config(model, topology, dp=HSDP, optimizer=_options(divide), precision=precision)
    ready = train(build(launch, config), STEPS)
    weights = whole_weights(ready)
    return weights, ready.norms, ready.losses, ready.optimizer.optimizer.num_orthogonalized


# What depends on megatron-core's version is in every lane: whom ranks share weights with, and how they divide them
# (test_share_plans.py), and training with outer=replicate over experts (test_combinations.py).
@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "topology"),
    [("moe", EP), ("dense", Topology()), ("dense", TP)],
    ids=["moe-ep2", "dense", "dense-tp2"],
)
def test_divided_replicas_equal_undivided_ones_and_one_process(name: str, topology: Topology) -> None:
    """The same bits as undivided, the weights of one process in float64, and each matrix orthogonalised once."""
    model = {"dense": dense, "moe": moe}[name]()
    divided = run_ranks(4, _trained, model, topology, True, Precision.fp32)
    undivided = run_ranks(4, _trained, model, topology, False, Precision.fp32)
    wanted = reference(name, "hp_muon", 4)
    for (weights, norms, losses, _), (others, other_norms, other_losses, _) in zip(divided, undivided, strict=True):
        assert (norms, losses) == (other_norms, other_losses)
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
    worst = max((relative(divided[0][0][key], weight), key) for key, weight in wanted["weights"].items())
    assert worst[0] < TOLERANCE["hp_muon"], worst
    counts, whole = ([told[3] for told in runs] for runs in (divided, undivided))
    assert 2 * sum(counts) == sum(whole)
    assert max(counts) < max(whole)


def _counted(launch: Launch, model: Model, topology: Topology) -> Any:
    """What a step broadcasts by axis, and the bytes of its buffers."""
    from hp_muon_plugin.platform.counting import CountingWire
    from hp_muon_plugin.platform.wire import C10dWire

    wire = CountingWire(C10dWire())
    config = train_config(model, topology, dp=HSDP, optimizer=_options(True))
    with mock.patch("hp_muon_plugin.muon.distributed.optimizer.C10dWire", return_value=wire):
        ready = train(build(launch, config), 1)
    counts = {axis: told for (kind, axis), told in wire.counts().items() if kind is Collective.BROADCAST}
    return counts, ready.optimizer.optimizer._workspace.nbytes, torch.get_num_threads()


@pytest.mark.once
def test_the_dry_run_tells_what_replicas_send_and_the_buffers_of_a_rank() -> None:
    model, topology = moe(), EP
    config = train_config(model, topology, dp=HSDP, optimizer=_options(True))
    specs = gpt_specs(model, topology, 128, _options(True))
    muon = [route.spec for route in route_parameters(specs) if route.algorithm is Algorithm.muon]
    stage = stage_shares(config, plan_shards(config, specs, 4, stage=0), muon, 4)
    assert [kind[0].sent.num_weights for kind in stage.kinds] == [
        2 * 4,
        2 * 2 * 2,
    ]  # of two layers, and two experts a rank
    for rank, (counts, num_bytes, num_threads) in enumerate(run_ranks(4, _counted, model, topology)):
        footprint = Footprint(_options(True), "cpu", num_threads=num_threads)
        for kind, axis in zip(stage.kinds, ("dp_replicate", "expert_dp_replicate"), strict=True):
            share, place = stage.share_of(kind, rank)
            footprint.add_plan(share.plan, place)
            footprint.add_sent(share.sent.packed(place))
            number, arriving = stage.arriving(share)[place].by_name["broadcast"]
            sent = 4 * sum(share.sent.numels[place].get(share.replica, []))
            assert (number, arriving + sent) == (counts[axis].num_collectives, counts[axis].num_bytes)
        assert footprint.nbytes == num_bytes


@pytest.mark.once
def test_a_run_goes_on_bit_for_bit_and_every_replica_has_all_state(tmp_path: Path) -> None:
    def config(**checkpoint: Any) -> Train:
        ready = train_config(moe(), Topology(), dp=HSDP, optimizer=_options(True), precision=Precision.bf16, steps=4)
        return replace(ready, checkpoint=Checkpoint(save=str(tmp_path), **checkpoint))

    straight = run(4, config(every=2), 4)
    resumed = run(4, config(resume=str(tmp_path / "iter_0000002")), 4)
    for first, then in zip(straight, resumed, strict=True):
        assert then.begin == 2
        assert then.losses == first.losses[2:]
        assert first.state.keys() == then.state.keys()
        assert all(torch.equal(value, then.state[name]) for name, value in first.state.items())
        assert all(torch.equal(weight, then.weights[name]) for name, weight in first.weights.items())
    for one, other in zip(straight[:2], straight[2:], strict=True):
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
