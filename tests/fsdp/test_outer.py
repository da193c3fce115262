"""Reductions between replicas: who updates what, and when they begin."""

from typing import Any

import torch
from torch import nn

from hp_muon_plugin.bench.fsdp_rank import make_mesh
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.api import schedule_of
from hp_muon_plugin.train.environment import Launch
from tests.dist_pool import joined, run_ranks


def owned_share(launch: Launch, outer_bucket_bytes: int) -> float:
    joined(launch)
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)]) for _ in range(3)])
    mesh = make_mesh(2)
    for layer in model:
        hp_fully_shard(layer, mesh)
    hp_fully_shard(model, mesh, outer="shard", outer_bucket_bytes=outer_bucket_bytes)
    model(torch.ones(2, 32)).sum().backward()
    shards = list(model.parameters())
    return sum(p.numel() for p in shards if p.grad is not None) / sum(p.numel() for p in shards)


def test_every_rank_updates_its_part_of_its_shard() -> None:
    """Owners went by place in the whole bucket: with a reduction per unit, half of the ranks updated nothing."""
    for outer_bucket_bytes in (100, 1 << 20):
        assert run_ranks(4, owned_share, outer_bucket_bytes) == [0.5] * 4


def default_groups(launch: Launch) -> Any:
    joined(launch)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)])
    for layer in model:
        hp_fully_shard(layer, make_mesh(1))
    hp_fully_shard(model, make_mesh(1))
    return [len(group.buckets) for group in schedule_of(model).reducer.groups]


def test_slow_reductions_begin_before_backward_ends() -> None:
    """All of a model below 32 MiB was one reduction, which nothing could hide."""
    assert run_ranks(2, default_groups) == [[2] * 8] * 2
