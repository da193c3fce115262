"""Ranks that hold the same weights divide the matrices: each is orthogonalised once, and all have the same bits."""

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.train.setup import Launch
from tests.muon.test_distributed_muon import (
    SHAPES,
    STEPS,
    _filled,
    _model,
    assert_close,
    give_grads,
    reference,
    sharded,
    whole_weights,
)


def trained(model: nn.Module, **options: object) -> ShardedMuonOptimizer:
    optimizer = build_optimizer(model, **options)
    assert isinstance(optimizer, ShardedMuonOptimizer)
    for step in range(STEPS):
        give_grads(model, _filled(step + 1, SHAPES))
        optimizer.step()
    return optimizer


def run_under_ddp(launch: Launch, divide: bool | None) -> tuple[int, bool]:
    expected = reference(SHAPES)
    joined(launch)
    model = _model(SHAPES)
    optimizer = trained(model, divide_replicas=divide)
    found = whole_weights(model)
    muon = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    assert len(muon) == 8
    assert all(optimizer.state[p]["momentum_buffer"].abs().sum() > 0 for p in muon)  # on every rank
    return optimizer.num_orthogonalized, all(torch.equal(found[name], value) for name, value in expected.items())


NUM_MATRICES = 6 + 6 + 1  # six weights, the experts, and one expert


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_matrix_is_orthogonalized_once_under_ddp(ranks: int) -> None:
    results = run_ranks(ranks, run_under_ddp, True)
    assert all(is_equal for _, is_equal in results), "the bits of one process"
    assert sum(number for number, _ in results) == STEPS * NUM_MATRICES


def test_replicas_compute_alike_if_told_to() -> None:
    assert run_ranks(2, run_under_ddp, False) == [(STEPS * NUM_MATRICES, True)] * 2


@pytest.mark.parametrize("layout", ["flat", "fully_shard"])
def test_replicas_of_shards_divide_the_work(layout: str) -> None:
    assert sum(run_ranks(4, run_hybrid, layout)) == STEPS * NUM_MATRICES


def run_hybrid(launch: Launch, layout: str) -> int:
    expected = reference(SHAPES)
    joined(launch)
    mesh = init_device_mesh("cpu", (2, launch.world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(SHAPES, layout, mesh)
    optimizer = trained(model, divide_replicas=True, strategy="alltoall")
    assert_close(whole_weights(model), expected, layout)
    return optimizer.num_orthogonalized
