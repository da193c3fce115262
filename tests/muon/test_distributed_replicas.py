"""Ranks that hold the same weights divide the matrices: each is orthogonalised once, and all have the same bits."""

from unittest import mock

import pytest
import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.config.optimizer import HpMuon, MuonRates
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.replica_plan import replica_owners
from hp_muon_plugin.muon.distributed.shards import shards_of
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import (
    SHAPES,
    assert_close,
    filled,
    give_grads,
    model_of_weights,
    sharded,
    trained,
    whole_weights,
)
from muon.test_distributed_muon import GRADIENTS, reference


@pytest.fixture(autouse=True)
def _reference() -> None:
    """Ranks are forked from here, and need not compute it again."""
    reference()


def run_under_ddp(launch: Launch, divide: bool | None, alone: int = 1 << 20) -> tuple[int, bool]:
    expected = reference()
    joined(launch)
    model = model_of_weights(SHAPES)
    with mock.patch("hp_muon_plugin.muon.distributed.replica_plan._ALONE_NUMEL", alone):
        optimizer = build_optimizer(model, divide_replicas=divide)
        assert isinstance(optimizer, ShardedMuonOptimizer)
        found = trained(model, optimizer, GRADIENTS)
    muon = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    assert len(muon) == 8
    assert all(optimizer.state[p]["momentum_buffer"].abs().sum() > 0 for p in muon)  # on every rank
    return optimizer.num_orthogonalized, all(torch.equal(found[name], value) for name, value in expected.items())


NUM_MATRICES = 6 + 6 + 1  # six weights, the experts, and one expert


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_matrix_is_orthogonalized_once_under_ddp(ranks: int) -> None:
    results = run_ranks(ranks, run_under_ddp, True)
    assert all(is_equal for _, is_equal in results), "the bits of one process"
    assert sum(number for number, _ in results) == len(GRADIENTS) * NUM_MATRICES


def test_large_weights_are_sent_from_where_they_lie() -> None:
    """A buffer held all of them twice: 5 GB a rank for the experts of a 505B model."""
    results = run_ranks(2, run_under_ddp, True, 500)
    assert all(is_equal for _, is_equal in results)


def test_replicas_compute_alike_if_told_to() -> None:
    assert run_ranks(2, run_under_ddp, False) == [(len(GRADIENTS) * NUM_MATRICES, True)] * 2


@pytest.mark.parametrize("layout", ["flat", "fully_shard"])
def test_replicas_of_shards_divide_the_work(layout: str) -> None:
    assert sum(run_ranks(4, run_hybrid, layout)) == len(GRADIENTS) * NUM_MATRICES


def run_hybrid(launch: Launch, layout: str) -> int:
    expected = reference()
    joined(launch)
    mesh = init_device_mesh("cpu", (2, launch.world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(SHAPES, layout, mesh)
    optimizer = build_optimizer(model, divide_replicas=True, strategy="alltoall")
    assert_close(trained(model, optimizer, GRADIENTS), expected, layout)
    return optimizer.num_orthogonalized


def run_only_parameter(launch: Launch) -> int:
    shapes = {"only": (24, 80)}
    gradients = [filled(seed, shapes) for seed in (1, 2)]
    alone = model_of_weights(shapes)
    expected = trained(alone, build_optimizer(alone), gradients)
    joined(launch)
    model = model_of_weights(shapes)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hp_fully_shard(model, mesh, outer="shard")
    optimizer = build_optimizer(model, divide_replicas=True, strategy="alltoall")
    for gradient in gradients:
        give_grads(model, gradient)
        for shard in shards_of(model):
            if not shard.is_owned:
                shard.param.grad = None
        optimizer.step()
    assert_close(whole_weights(model), expected, "shard")
    return optimizer.num_orthogonalized


def test_the_only_parameter_of_a_model_is_updated_by_the_replica_that_owns_it() -> None:
    """That replica owned all, took replicas for undivided, and would have waited for the others' weights."""
    assert sum(run_ranks(4, run_only_parameter)) == 2


@pytest.mark.parametrize(
    ("rates", "is_divided"),
    [
        (MuonRates(), True),
        (MuonRates(replica_bytes_per_s=1e3), False),
        (MuonRates(bytes_per_s=1e3), False),
        (MuonRates(bytes_per_s=1e3, replica_bytes_per_s=1e12), True),
    ],
    ids=["default", "slow between replicas", "slow", "slow but between replicas"],
)
def test_the_link_between_replicas_decides_whether_they_divide(rates: MuonRates, is_divided: bool) -> None:
    specs = [ParamSpec(f"w{index}", Role.matrix, (512, 512), view=plain_matrix(512, 512)) for index in range(2)]
    weights = [ShardedParam(spec, Cuts.of([0, 512 * 256, 512 * 512])) for spec in specs]
    owners = replica_owners(weights, HpMuon(rates=rates), replicas=2, device="cpu")
    assert set(owners) == ({0, 1} if is_divided else {None})


def test_replicas_share_the_experts_of_every_rank() -> None:
    """With one expert on a rank and layer, one replica updated all of the first rank's and the other one none."""
    experts = [
        ShardedParam(
            ParamSpec(f"layers.{layer}.experts.{place}", Role.matrix, (64, 96), view=plain_matrix(64, 96)),
            Cuts.of([0] * (place + 1) + [64 * 96] * (4 - place)),
        )
        for layer in range(4)
        for place in range(4)
    ]
    owners = replica_owners(experts, HpMuon(divide_replicas=True), replicas=2, device="cpu")
    for place in range(4):
        assert sorted(owner for owner in owners[place::4] if owner is not None) == [0, 0, 1, 1]
