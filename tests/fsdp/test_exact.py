"""Bit for bit as DistributedDataParallel and as torch's fully_shard, where arithmetic is exact."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks

STEPS = 20


class Gate(nn.Module):
    """Gradients are integers whatever the weights are, and depend on the signs of what they give."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-8, 9, (rows, cols)).float())
        self.bias = nn.Parameter(torch.randint(-8, 9, (rows,)).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.linear(x[..., : self.weight.shape[1]], self.weight, self.bias)).sum(-1)


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gate(5, 7), Gate(1, 3), Gate(16, 8), Gate(2, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


def train(launch: Launch, replicas: int, outer: str) -> None:
    joined(launch)
    size = launch.world_size
    mesh = init_device_mesh("cpu", (size,))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    models: list[Any] = []
    for _ in range(3):
        torch.manual_seed(5)
        models.append(Gates())
    ours, replicated, theirs = models
    for layer in ours.layers:
        hp_fully_shard(layer, mesh)
    hp_fully_shard(ours, mesh, outer=outer, outer_bucket_bytes=64)
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    wrapped = DistributedDataParallel(replicated)
    runs = [(model, torch.optim.SGD(model.parameters(), lr=0.25)) for model in (ours, wrapped, theirs)]
    generator = torch.Generator().manual_seed(launch.rank)
    for _ in range(STEPS):
        batch = torch.randint(-4, 5, (3, 8), generator=generator).float()
        for model, optimizer in runs:
            (size * model(batch)).backward()  # so that means are integers
            optimizer.step()
            optimizer.zero_grad()
    mine = full_state_dict(ours)
    for name, value in replicated.named_parameters():
        assert value.frac().remainder(0.25).eq(0).all(), "the test is not exact"
        assert torch.equal(mine[name], value), name
        assert torch.equal(theirs.state_dict()[name].full_tensor(), value), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_as_ddp_and_fully_shard(world_size: int) -> None:
    run_ranks(world_size, train, 1, "replicate")


@pytest.mark.parametrize("outer", ["replicate", "broadcast", "shard"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_with_replicas(world_size: int, outer: str) -> None:
    run_ranks(world_size, train, 2, outer)


def _norms(launch: Launch, replicas: int, outer: str) -> None:
    from hp_muon_plugin.fsdp.norms import clip_grad_norm_, grad_norm

    joined(launch)
    mesh = init_device_mesh("cpu", (replicas, launch.world_size // replicas), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(5)
    sharded = Gates()
    torch.manual_seed(5)
    alone = Gates()
    kept_whole = {sharded.layers[1].weight}
    for layer in sharded.layers:
        hp_fully_shard(layer, mesh, replicate_params=kept_whole)
    hp_fully_shard(sharded, mesh, outer=outer)
    batch = launch.world_size * torch.arange(24.0).view(3, 8)
    sharded(batch).backward()
    alone(batch).backward()
    for kind in (2.0, float("inf")):
        want = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()], kind)
        torch.testing.assert_close(grad_norm(sharded, norm_type=kind), want, rtol=1e-6, atol=0.0)
    before = clip_grad_norm_(sharded, 2.0)
    torch.testing.assert_close(before, torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()]))
    torch.testing.assert_close(grad_norm(sharded), torch.tensor(2.0), rtol=1e-5, atol=0.0)
    dist.barrier()


@pytest.mark.parametrize("outer", ["replicate", "broadcast", "shard"])
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (4, 2), (6, 2)])
def test_every_gradient_counts_once_in_the_norm(world_size: int, replicas: int, outer: str) -> None:
    run_ranks(world_size, _norms, replicas, outer)
