"""Building the optimizer for plain PyTorch, from a module or from named parameters.

This is what ``hydra.utils.instantiate(cfg.optimizer, params=...)`` calls in somebody else's
application.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.checks import check_optimizer
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.options import from_options
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.baseline import BaselineAdamW
from hp_muon_plugin.muon.distributed.agreement import check_job
from hp_muon_plugin.muon.distributed.ahead import overlap_error
from hp_muon_plugin.muon.distributed.build import norm_axes, replicated_optimizer, sharded_optimizer
from hp_muon_plugin.muon.distributed.shards import LISTEN, axes_of, shards_of
from hp_muon_plugin.muon.names import module_specs, named_specs, refuse_sharded
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.routing import Algorithm, Route, route_parameters
from hp_muon_plugin.muon.scalar import adamw_defaults
from hp_muon_plugin.platform.collectives import AxisGroup

Params = torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]]
_INSTEAD_OF_GROUPS = (
    "; rates and decay of groups are options, optimizer.lr and optimizer.weight_decay for matrices, optimizer.adamw.lr "
    "and optimizer.adamw.weight_decay for the rest; optimizer.muon_params and optimizer.adamw_params say which is which"
)


def build_optimizer(params: Params, **options: Any) -> HpMuonOptimizer:
    """Muon for the matrices of a model and AdamW for the rest.

    With an initialised process group every rank must hold the same parameters (as under DDP), or its
    part of them: a model that ``hp_fully_shard`` or torch's ``fully_shard`` divided over ranks. Missing or
    non-finite gradients are then agreed on by all ranks.

    Args:
        params: The model itself, which is best because module types tell embeddings and
            convolutions apart, or ``model.named_parameters()``. A sharded model must be passed itself.
        **options: Any option of :class:`~hp_muon_plugin.config.optimizer.HpMuon`.

    Returns:
        The optimizer. ``routing_table(optimizer)`` of this package prints who updates what.

    Raises:
        ConfigError: If an option is unknown or wrong, the parameters have no names or are shards of
            another library, or nothing is left for Muon.

    Example:
        >>> optimizer = build_optimizer(model, lr=5e-3, weight_decay=0.1)
    """
    config = from_options(HpMuon, options, prefix="optimizer")
    if config.qk_clip is not None:
        raise ConfigError(
            "optimizer.qk_clip",
            config.qk_clip,
            "needs to know the attention layers, which only Megatron's models tell",
            "set optimizer.qk_clip=null, or train under Megatron",
        )
    specs = _specs(params)
    shards = shards_of(params) if isinstance(params, torch.nn.Module) else []
    if not shards:
        refuse_sharded(
            "params",
            ((spec.name, param) for param, spec in specs.items()),
            "pass the model itself, sharded by hp_fully_shard or torch's fully_shard, or wrap the model in "
            "DistributedDataParallel instead, or take optimizer=adamw, which works on shards",
            with_ours=True,
        )
    routes = route_parameters(list(specs.values()), muon_params=config.muon_params, adamw_params=config.adamw_params)
    world = AxisGroup.from_group("world", dist.group.WORLD) if _world_size() > 1 and dist.group.WORLD else None
    # before a rank fails alone, and the others wait for it
    check_job(config, routes, axes_of(shards) if shards else [world] if world else [])
    if not any(route.algorithm is Algorithm.muon for route in routes):
        raise ConfigError(
            "optimizer",
            "hp_muon",
            f"none of the {len(routes)} parameters is a matrix that Muon takes",
            "pass the model itself (not a flattened or sharded copy), or take optimizer=adamw",
        )
    groups = muon_groups(list(specs), routes, config)
    if shards:
        return sharded_optimizer(shards, groups, specs, config, listen=getattr(params, LISTEN, None))
    if world:
        return replicated_optimizer(world, groups, specs, config)
    if config.overlap_backward:
        raise overlap_error("a model that is not sharded", "there is nothing to exchange")
    return HpMuonOptimizer(groups, specs, config)


def build_adamw(params: Params, **options: Any) -> BaselineAdamW:
    """AdamW with no decay on norms, biases and other vectors: the baseline.

    Args:
        params: The model, or ``model.named_parameters()``.
        **options: Any option of :class:`~hp_muon_plugin.config.optimizer.AdamW`.

    Returns:
        torch's AdamW, which clips by ``clip_grad`` first.

    Raises:
        ConfigError: If an option is unknown or wrong, or the parameters are shards of ``hp_fully_shard`` without
            their model.
    """
    config = from_options(AdamW, options, prefix="optimizer")
    check_optimizer(config)
    specs = _specs(params)
    shards = shards_of(params) if isinstance(params, torch.nn.Module) else []
    is_ours = any(hasattr(param, "hp_shard") for param in specs)
    if is_ours and not shards and config.clip_grad > 0:
        raise ConfigError(
            "params",
            next(spec.name for param, spec in specs.items() if hasattr(param, "hp_shard")),
            "is a shard of hp_fully_shard, and the norm of all gradients takes those of other ranks",
            "pass the root of the model itself, or set optimizer.clip_grad=0",
        )
    axes, summed = norm_axes(shards) if is_ours and shards else ({}, {})
    trainable = {p: spec for p, spec in specs.items() if spec.trainable}
    groups = [
        {"params": [p for p, spec in trainable.items() if len(spec.shape) > 1], "weight_decay": config.weight_decay},
        {"params": [p for p, spec in trainable.items() if len(spec.shape) <= 1], "weight_decay": 0.0},
    ]
    return BaselineAdamW([group for group in groups if group["params"]], specs, config, axes=axes, summed=summed)


def muon_groups(params: Sequence[torch.nn.Parameter], routes: Sequence[Route], config: HpMuon) -> list[dict[str, Any]]:
    """Parameter groups by route: Muon, AdamW with decay, AdamW without (norms, biases, vectors).

    Args:
        params: Parameters.
        routes: Their routes, in the same order.
        config: Options.

    Returns:
        Groups without empty ones; frozen parameters are in none.
    """
    pairs = list(zip(params, routes, strict=True))
    muon = [p for p, route in pairs if route.algorithm is Algorithm.muon]
    scalar = [(p, route.spec) for p, route in pairs if route.algorithm is Algorithm.adamw]
    adamw = adamw_defaults(config)
    groups: list[dict[str, Any]] = [
        {"params": muon, "algorithm": "muon", "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p, spec in scalar if len(spec.shape) > 1], "algorithm": "adamw", **adamw},
        {
            "params": [p for p, spec in scalar if len(spec.shape) <= 1],
            "algorithm": "adamw",
            **adamw,
            "weight_decay": 0,
        },
    ]
    return [group for group in groups if group["params"]]


def _specs(params: Params) -> dict[torch.nn.Parameter, ParamSpec]:
    if isinstance(params, torch.nn.Module):
        return module_specs(params)
    listed = list(params)
    if not listed or not all(isinstance(item, tuple) and len(item) == 2 for item in listed):
        are_groups = any(isinstance(item, Mapping) for item in listed)  # also OmegaConf's, which Hydra makes of them
        raise ConfigError(
            "params",
            type(listed[0]).__name__ if listed else "[]",
            "Muon routes parameters by name, and these have none",
            "pass the model, or model.named_parameters()" + (_INSTEAD_OF_GROUPS if are_groups else ""),
        )
    return named_specs(listed)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
