"""Passes that are no plain training step: in inference mode first, and through gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block


def _layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(Block(WIDTH) for _ in range(4)))


def _sharded(launch: Launch, layout: str = "flat") -> nn.Module:
    model, mesh = _layers(), init_device_mesh("cpu", (launch.world_size,))
    for layer in model:
        hp_fully_shard(layer, mesh, shard_layout=layout)
    return hp_fully_shard(model, mesh)


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def _evaluated_first(launch: Launch, layout: str) -> float:
    joined(launch)
    model, alone = _sharded(launch, layout), _layers().double()
    with torch.inference_mode():
        model(_batch(launch.rank))
    for _ in range(2):
        for rank in range(launch.world_size):
            (alone(_batch(rank).double()).square().mean() / launch.world_size).backward()
        model(_batch(launch.rank)).square().mean().backward()
        with torch.inference_mode():
            model(_batch(launch.rank))
    whole = {name: parameter.grad.reshape(-1) for name, parameter in alone.named_parameters()}
    return max(
        float((p.grad.reshape(-1) - whole[name][p.hp_shard.start : p.hp_shard.stop]).abs().max())
        for name, p in model.named_parameters()
        if p.numel()
    )


@pytest.mark.parametrize("layout", ["flat", "per_param"])
def test_a_model_that_is_evaluated_in_inference_mode_first_trains_after_it(layout: str) -> None:
    """Its buffers were inference tensors: "Inference tensors cannot be saved for backward"."""
    assert max(run_ranks(2, _evaluated_first, layout)) < 1e-5


def _penalised(launch: Launch) -> str:
    joined(launch)
    model = _sharded(launch)
    x = _batch(launch.rank).requires_grad_()
    try:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    except ConfigError as error:
        (found,) = torch.autograd.grad(model(x).sum(), x)
        assert found.shape == x.shape
        return str(error)
    return ""


def test_a_graph_of_a_backward_pass_is_refused() -> None:
    """A gradient penalty read other layers' weights, which had taken the place, and was wrong by 0.1 to 0.3."""
    for refusal in run_ranks(2, _penalised):
        assert refusal.startswith("create_graph=True: 3 is sharded by hp_fully_shard"), refusal
