"""Whole parameters of a sharded model: reading them, loading them, and initialising a model on the meta device."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.roots import schedule_of, units_of
from hp_muon_plugin.fsdp.unit import Unit


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers of a sharded model, whole. All ranks must call it.

    Args:
        module: A root.

    Returns:
        New tensors by the names of ``module.state_dict()``, in the types of the shards, on every rank.
        One unit at a time is whole besides what is returned.
    """
    schedule = schedule_of(module)
    schedule.settle_weights()
    whole: dict[int, torch.Tensor] = {}
    for unit in units_of(module):
        for bucket in unit.buckets:
            flat = bucket.gather_master()
            for parameter in bucket.parameters:
                start = parameter.placement.offset
                value = flat[start : start + parameter.placement.numel].view(parameter.shape).clone()
                whole[id(parameter.sharded)] = value
    return {
        name: whole[id(value)] if id(value) in whole else value.detach().clone()
        for name, value in module.state_dict(keep_vars=True).items()
    }


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's ranges from whole parameters. No communication.

    Args:
        module: A root.
        state: Whole tensors by the names of ``module.state_dict()``.

    Raises:
        ConfigError: If a name is missing or unknown, or a shape differs; nothing is changed then.
    """
    schedule_of(module).reshard()
    own = module.state_dict(keep_vars=True)
    for name in own.keys() ^ state.keys():
        where = "the model" if name in state else "the given state"
        raise ConfigError("state", name, f"is not in {where}", "give the state of the same model")
    for name, value in own.items():
        shape = value.hp_shard.shape if hasattr(value, "hp_shard") else value.shape
        if shape != state[name].shape:
            raise ConfigError("state", name, f"has shape {tuple(state[name].shape)}", f"the model has {tuple(shape)}")
    for name, value in own.items():
        if hasattr(value, "hp_shard"):
            info = value.hp_shard
            value.detach().reshape(-1).copy_(state[name].reshape(-1)[info.start : info.stop])
        else:
            value.detach().copy_(state[name])


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            "init", type(module).__name__, "has parameters or buffers, but no reset_parameters()", "pass init="
        )
    reset()


@torch.no_grad()
def initialize(module: nn.Module, device: torch.device | str, init: Callable[[nn.Module], None] = _reset) -> None:
    """Give a model that was built and sharded on the meta device its memory and its initial values.

    Modules are initialised in the order of ``module.modules()`` with whole parameters, so that the
    values are those of an unsharded model initialised in this order, if all ranks have the same seed.
    At most two units are whole at a time: the root, and the one that is being initialised.

    The shards are new parameters: make the optimizer afterwards.

    Args:
        module: A root that has not run yet.
        device: Where.
        init: Called with every module that has parameters or buffers of its own. None of them is on the
            meta device then.

    Raises:
        ConfigError: If a module needs initialising and has no ``reset_parameters()``.
    """
    unit_of = {
        id(holder): unit
        for unit in units_of(module)
        for bucket in unit.buckets
        for parameter in bucket.parameters
        for holder, _ in parameter.places
    }
    left = Counter(id(unit_of[id(child)]) for child in module.modules() if id(child) in unit_of)
    opened: dict[int, list[torch.Tensor]] = {}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device=device)
        unit = unit_of.get(id(child))
        if unit is not None and id(unit) not in opened:
            opened[id(unit)] = [_open(bucket, torch.device(device)) for bucket in unit.buckets]
        if unit is not None or child._buffers:
            init(child)
        if unit is not None:
            left[id(unit)] -= 1
            if left[id(unit)] == 0:
                _close(unit, opened.pop(id(unit)))


def _open(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """Register whole parameters of the type of the shards."""
    flat = torch.zeros(bucket.layout.numel, dtype=bucket.master.dtype, device=device)
    for parameter in bucket.parameters:
        start = parameter.placement.offset
        value = flat[start : start + parameter.placement.numel].view(parameter.shape)
        whole = nn.Parameter(value, requires_grad=parameter.sharded.requires_grad)
        vars(whole).update({k: v for k, v in vars(parameter.sharded).items() if k != "hp_shard"})
        parameter.register(whole)
    return flat


def _close(unit: Unit, flats: list[torch.Tensor]) -> None:
    """Keep this rank's ranges, and register them."""
    for bucket, flat in zip(unit.buckets, flats, strict=True):
        bucket.materialize(flat)
        for parameter in bucket.parameters:
            parameter.register(parameter.sharded)
