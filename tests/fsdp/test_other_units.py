"""Ranks that do not run the same units: layers are alike, so that messages of one fit where another's are expected."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block


class Dropping(nn.Module):
    """Leaves layers out, as stochastic depth does where each rank throws its own dice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


def _run(launch: Launch, orders: list[list[int]]) -> str:
    joined(launch, timeout_s=2.5)
    torch.manual_seed(1)
    model, mesh = Dropping(), init_device_mesh("cpu", (launch.world_size,))
    for layer in model.layers:
        hp_fully_shard(layer, mesh)
    hp_fully_shard(model, mesh, prefetch=0)
    x = torch.ones(2, WIDTH)
    model(x, [0, 1, 2]).sum().backward()
    dist.barrier()  # so that both wait at about the same time
    try:
        model(x, orders[launch.rank]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("one", "other"), [([0, 1], [0, 2]), ([0, 1, 2], [0, 2, 1]), ([0, 1], [0])])
def test_a_rank_that_runs_other_units_is_told_what_the_others_wait_for(one: list[int], other: list[int]) -> None:
    """Each rank took the half of another layer for its own layer's, and trained on without a word."""
    told = run_ranks(2, _run, [one, other])
    for mine, their in ((0, 1), (1, 0)):
        waited = told[their].split(" failed: ")[0]
        assert f"rank {their} waited for: {waited}" in told[mine], told
        assert "run the same modules in the same order" in told[mine]
        assert waited not in told[mine].split(" failed: ")[0]
