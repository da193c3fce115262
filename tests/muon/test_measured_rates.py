"""Rates measured at start: all ranks plan by the slowest, also those that no axis of their own connects."""

import time
from typing import Any

import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.config.optimizer import HpMuon, MuonRates
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.measured import measured_rates
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import Shapes, assert_close, filled, model_of_weights, sharded, trained

SHAPES: Shapes = {"wide": (24, 80), "tall": (72, 20), "square": (32, 32)}
DELAY_S = 0.05


class SlowWire(C10dWire):
    """Gathers of one rank's process take at least some time."""

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Any:
        time.sleep(DELAY_S)
        return super().all_gather(output, source, axis)


def _measure(launch: Launch) -> list[tuple[float, float, float, str]]:
    joined(launch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    shards, replicas = (AxisGroup.from_group(name, mesh.get_group(name)) for name in ("shards", "replicas"))
    wire = SlowWire() if launch.rank == 3 else C10dWire()
    found = measured_rates(
        [shards, AxisGroup.single("alone")],
        MuonRates(flops_per_s=7e9),
        device=torch.device("cpu"),
        wire=wire,
        agree=[shards, replicas],
    )
    return [(rates.flops, rates.bytes_received, rates.message_s, rates.source) for rates in found]


def test_all_ranks_take_the_slowest_and_stated_rates_count() -> None:
    results = run_ranks(4, _measure)
    assert results == [results[0]] * 4
    (flops, received, message_s, source), alone = results[0]
    assert flops == alone[0] == 7e9
    assert message_s >= DELAY_S  # of rank 3 alone, which is in no shard group with ranks 0 and 1
    assert received > 0
    assert source == "measured at start over shards"
    assert alone[1:3] == (float("inf"), 0.0)


def _train(launch: Launch) -> list[str]:
    gradients = [filled(1, SHAPES), filled(2, SHAPES)]
    reference = model_of_weights(SHAPES)
    expected = trained(reference, build_optimizer(reference), gradients)
    joined(launch)
    model = sharded(SHAPES, "flat", init_device_mesh("cpu", (launch.world_size,)))
    optimizer = build_optimizer(model, rates={"measure": True})
    assert_close(trained(model, optimizer, gradients), expected, "measured")
    return [plan.rates.source for plan in optimizer.share_plans]


def test_an_optimizer_that_measures_trains_alike() -> None:
    assert HpMuon().rates.measure is False  # equal starts choose alike unless told otherwise
    assert run_ranks(3, _train) == [["measured at start over dp_shard"]] * 3
