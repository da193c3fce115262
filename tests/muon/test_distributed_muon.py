"""Muon over shared matrices: every strategy, layout and mesh gives what one process gives."""

from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.train.setup import Launch

STEPS = 4
STRATEGIES = ("auto", "allgather", "allgather_dedup", "alltoall", "gram")
LAYOUTS = ("flat", "per_param", "fully_shard")
SHAPES = {
    "wide": (24, 80),
    "tall": (72, 20),
    "square": (32, 32),
    "short": (2, 40),
    "row": (1, 16),
    "column": (33, 1),
    "odd": (13, 31),
    "huge": (96, 64),
    "experts": (6, 8, 20),
    "one_expert": (1, 12, 10),
    "bias": (7,),
}


class Weights(nn.Module):
    """One unit per weight, so that shards end in many places."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, shape in shapes.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(shape))
            self.layers[name] = layer

    def named_weights(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())


def _filled(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.weight": torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def _model(shapes: dict[str, tuple[int, ...]]) -> Weights:
    model = Weights(shapes)
    for name, value in _filled(0, shapes).items():
        model.get_parameter(name).data.copy_(value)
    return model


def sharded(shapes: dict[str, tuple[int, ...]], layout: str, mesh: DeviceMesh, **options: Any) -> Weights:
    model = _model(shapes)
    units = [[layer] for layer in model.layers.values()]
    for (layer,) in units[::2]:  # every other weight in a unit of its own, the rest together in the root
        fully_shard(layer, mesh=mesh) if layout == "fully_shard" else hp_fully_shard(
            layer, mesh, shard_layout=layout, **options
        )
    if layout == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        hp_fully_shard(model, mesh, shard_layout=layout, **options)
    return model


def give_grads(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        grad = whole[name].to(param.dtype)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        elif hasattr(param, "hp_shard"):
            param.grad = grad.reshape(-1)[param.hp_shard.start : param.hp_shard.stop].reshape(param.shape).clone()
        else:
            param.grad = grad.clone()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if any(hasattr(param, "hp_shard") for param in model.parameters()):
        return full_state_dict(model)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def reference(shapes: dict[str, tuple[int, ...]], **options: Any) -> dict[str, torch.Tensor]:
    model = _model(shapes)
    optimizer = build_optimizer(model, **options)
    for step in range(STEPS):
        give_grads(model, _filled(step + 1, shapes))
        optimizer.step()
    return whole_weights(model)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    """1e-5 of the weights; 5e-5 of the change, which is what float32 Gram matrices may cost (docs/newton_schulz.md)."""
    start = _filled(0, {name.split(".")[1]: tuple(value.shape) for name, value in expected.items()})
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error <= 1e-5 * value.norm(), (what, name, float(error / value.norm()))
        assert error <= 5e-5 * (value - start[name]).norm(), (what, name, float(error))


def run_strategies(launch: Launch, layout: str, strategies: tuple[str, ...]) -> bool:
    expected = reference(SHAPES)
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in strategies:
        model = sharded(SHAPES, layout, mesh)
        optimizer = build_optimizer(model, strategy=strategy)
        assert isinstance(optimizer, ShardedMuonOptimizer)
        for step in range(STEPS):
            give_grads(model, _filled(step + 1, SHAPES))
            optimizer.step()
        assert_close(whole_weights(model), expected, strategy)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_gives_what_one_process_gives(layout: str, world_size: int) -> None:
    assert run_ranks(world_size, run_strategies, layout, STRATEGIES) == [True] * world_size
