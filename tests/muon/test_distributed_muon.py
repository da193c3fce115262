"""Muon over shared matrices: every strategy, layout and mesh gives what one process gives."""

import functools
import itertools
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import SHAPES, assert_close, filled, model_of_weights, sharded, trained

GRADIENTS = [filled(step, SHAPES) for step in range(1, 21)]
FEWER = 4  # steps of the case that takes longest; 20 on 8 ranks are in the flat layout and in test_distributed_meshes
STRATEGIES = ("auto", "allgather", "allgather_dedup", "alltoall", "gram")
LAYOUTS = ("flat", "per_param", "fully_shard")


@functools.cache
def reference(num_steps: int = len(GRADIENTS), **options: Any) -> dict[str, torch.Tensor]:
    model = model_of_weights(SHAPES)
    return trained(model, build_optimizer(model, **options), GRADIENTS[:num_steps])


def run_strategies(
    launch: Launch, layout: str, strategies: tuple[str, ...], num_steps: int, expected: dict[str, torch.Tensor]
) -> bool:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in strategies:
        model = sharded(SHAPES, layout, mesh)
        optimizer = build_optimizer(model, strategy=strategy)
        assert isinstance(optimizer, ShardedMuonOptimizer)
        assert_close(trained(model, optimizer, GRADIENTS[:num_steps]), expected, strategy)
    return True


# all layouts on few ranks; more ranks than rows or matrices where that takes the least time
CASES = [*itertools.product(LAYOUTS, (1, 2, 3, 4)), ("per_param", 6), ("flat", 8), ("fully_shard", 8)]


@pytest.mark.parametrize(("layout", "world_size"), CASES)
def test_every_strategy_gives_what_one_process_gives(layout: str, world_size: int) -> None:
    num_steps = FEWER if (layout, world_size) == ("fully_shard", 8) else len(GRADIENTS)
    told = run_ranks(world_size, run_strategies, layout, STRATEGIES, num_steps, reference(num_steps))
    assert told == [True] * world_size
