"""A model of weights of many shapes, sharded in every way, with given gradients, for tests of distributed Muon."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.options import from_options
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.muon.build import muon_groups
from hp_muon_plugin.muon.distributed.build import sharded_optimizer
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.shards import shards_of
from hp_muon_plugin.muon.names import module_specs
from hp_muon_plugin.muon.routing import route_parameters

Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {
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

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, shape in shapes.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(shape))
            self.layers[name] = layer


def filled(seed: int, shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.weight": torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def model_of_weights(shapes: Shapes) -> Weights:
    model = Weights(shapes)
    for name, value in filled(0, shapes).items():
        model.get_parameter(name).data.copy_(value)
    return model


def sharded(of: Shapes | Weights, layout: str, mesh: DeviceMesh, **options: Any) -> Weights:
    model = of if isinstance(of, Weights) else model_of_weights(of)
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
        if name not in whole:
            continue
        grad = whole[name].to(getattr(param, "grad_dtype", None) or param.dtype)
        if isinstance(param, DTensor):
            param.grad = _as_shard(grad, param)
        elif hasattr(param, "hp_shard"):
            param.grad = grad.reshape(-1)[param.hp_shard.start : param.hp_shard.stop].reshape(param.shape).clone()
        else:
            param.grad = grad.clone()


def _as_shard(whole: torch.Tensor, like: DTensor) -> DTensor:
    """``distribute_tensor`` without its collectives."""
    mesh, dim = like.device_mesh, next(d for d, placement in enumerate(like.placements) if type(placement) is Shard)
    pieces = whole.chunk(mesh.size(dim))
    index = mesh.get_local_rank(dim)
    local = pieces[index].clone() if index < len(pieces) else whole[:0].clone()
    return DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if any(hasattr(param, "hp_shard") for param in model.parameters()):
        return full_state_dict(model)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def built(model: nn.Module, *, given: dict[str, Any] | None = None, **options: Any) -> ShardedMuonOptimizer:
    """As ``build_optimizer``, with more for ``sharded_optimizer`` than users can say: a wire, rates, batch sizes."""
    config = from_options(HpMuon, options, prefix="optimizer")
    specs = module_specs(model)
    routes = route_parameters(list(specs.values()), muon_params=config.muon_params, adamw_params=config.adamw_params)
    groups = muon_groups(list(specs), routes, config)
    return sharded_optimizer(shards_of(model), groups, specs, config, **(given or {}))


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Sequence[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """One step for each set of gradients; the whole weights after them."""
    for whole in gradients:
        give_grads(model, whole)
        optimizer.step()
    return whole_weights(model)


def told(function: Callable[[], Any]) -> str:
    """The error that a call raises: its type and text, or that there was none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object, *, of_change: float = 5e-5
) -> None:
    """1e-5 of the weights; 5e-5 of the change, which is what float32 Gram matrices may cost (docs/newton_schulz.md)."""
    start = filled(0, {name.split(".")[1]: tuple(value.shape) for name, value in expected.items()})
    for name, value in expected.items():
        error = (found[name] - value).float().norm()
        assert error <= (1e-5 if of_change == 5e-5 else of_change) * value.norm(), (
            what,
            name,
            float(error / value.norm()),
        )
        assert error <= of_change * (value - start[name]).norm(), (what, name, float(error))
