"""Optimizer state: its size, and resuming from it bit for bit."""

import copy
import re
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.muon.table import routing_table
from hp_muon_plugin.train.setup import Launch
from lane.harness import (
    build,
    moe,
    train,
    train_config,
)


def _state_bytes(launch: Launch) -> Any:
    ready = train(build(launch, train_config(moe())), 1)
    inner = ready.optimizer.optimizer
    held: dict[str, int] = {}
    for group in inner.param_groups:
        for param in group["params"]:
            for name, value in inner.state[param].items():
                if name != "step":
                    held[group["algorithm"]] = held.get(group["algorithm"], 0) + value.numel() * value.element_size()
    sizes = {name: 0 for name in held}
    for group in inner.param_groups:
        sizes[group["algorithm"]] += sum(param.numel() for param in group["params"])
    return held, sizes, inner.plan.state_bytes(), routing_table(inner)


def test_muon_keeps_four_bytes_per_weight_and_adamw_eight() -> None:
    held, sizes, planned, table = run_ranks(1, _state_bytes)[0]
    assert held == {"muon": 4 * sizes["muon"], "adamw": 8 * sizes["adamw"]}
    assert planned == held["muon"]
    told = dict(re.findall(r"(muon|adamw)=\d+ parameters, ([\d.]+) MiB of state", table.splitlines()[-1]))
    assert told == {name: f"{count / 2**20:.3f}" for name, count in held.items()}


def _resumed(launch: Launch, precision: Precision) -> Any:
    """Three steps, state out and in, two more; against five straight."""
    config = train_config(moe(), Topology(ep=launch.world_size), precision=precision)
    ready = train(build(launch, config), 3)
    kept = copy.deepcopy(ready.optimizer.state_dict())
    weights = [param.detach().clone() for param in ready.model.parameters()]
    schedule = copy.deepcopy(ready.schedule.state_dict())
    train(ready, 2)
    straight = [param.detach().clone() for param in ready.model.parameters()]
    with torch.no_grad():
        for param, value in zip(ready.model.parameters(), weights, strict=True):
            param.copy_(value)
    ready.optimizer.load_state_dict(kept)
    ready.schedule.num_steps = 0
    ready.schedule.load_state_dict(schedule)
    train(ready, 2)
    return all(torch.equal(a, b) for a, b in zip(straight, ready.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_resuming_from_a_state_dict_is_bit_for_bit(precision: Precision) -> None:
    assert run_ranks(2, _resumed, precision) == [True, True]


def _distributed_checkpoint(launch: Launch, folder: str, precision: Precision) -> Any:
    from megatron.core import dist_checkpointing

    config = train_config(moe(), Topology(ep=launch.world_size), precision=precision)
    ready = train(build(launch, config), 3)
    inner = ready.model.module

    def state(is_loading: bool) -> dict[str, Any]:
        model_state = inner.sharded_state_dict()
        return {"model": model_state, "optimizer": ready.optimizer.sharded_state_dict(model_state, is_loading)}

    schedule = copy.deepcopy(ready.schedule.state_dict())
    dist_checkpointing.save(state(False), folder)
    train(ready, 2)
    straight = [param.detach().clone() for param in ready.model.parameters()]
    loaded = dist_checkpointing.load(state(True), folder)
    inner.load_state_dict(loaded["model"])
    ready.optimizer.load_state_dict(loaded["optimizer"])
    ready.schedule.num_steps = 0
    ready.schedule.load_state_dict(schedule)
    train(ready, 2)
    return all(torch.equal(a, b) for a, b in zip(straight, ready.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_resuming_from_megatrons_distributed_checkpoint_is_bit_for_bit(precision: Precision, tmp_path: Any) -> None:
    assert run_ranks(2, _distributed_checkpoint, str(tmp_path), precision) == [True, True]
