"""What torch offers for plain tensors and would do to shards without a word.

A shard is an ordinary parameter, so torch's own tools take it for a whole one, which is the same on every
rank. Three of them then give wrong training, or a checkpoint without most of the model. They refuse shards
once ``hp_fully_shard`` was called, and do with all other parameters what they always did.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import nn

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.stale import stepped_optimizers
from hp_muon_plugin.platform.patching import Patcher, Replacement

_PART = "_hp_fsdp_part"
_MODULES: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def note_parts(buckets: Iterable[Bucket]) -> None:
    """Mark parameters of which other ranks hold or update other parts.

    Args:
        buckets: Whose weights are divided.
    """
    for bucket in buckets:
        for parameter in bucket.parameters:
            setattr(parameter.sharded, _PART, True)
            _MODULES.update(module for module, _ in parameter.places)
    _install()


def is_part(parameter: object) -> bool:
    """Whether other ranks hold or update other parts of what this parameter is a shard of.

    Args:
        parameter: Of any model.
    """
    return hasattr(parameter, _PART) and hasattr(parameter, "hp_shard")  # the mark is copied to whole ones, too


@cache
def _install() -> None:
    from torch.distributed.checkpoint import default_planner  # half a second, which no other part of this package needs

    Patcher().apply(
        (
            Replacement(
                clip_grad,
                "_clip_grads_with_norm_",
                _clipping,
                "clip_grad_norm_ scales each rank's shards by the norm of these alone. It looks this helper up when it "
                "runs, whoever imported it; the public clip_grads_with_norm_, which takes a norm, is left alone",
            ),
            Replacement(
                torch.amp.GradScaler,
                "_unscale_grads_",
                _unscaling,
                "a rank whose own shards are finite takes a step that another leaves out, and scales differ after it",
            ),
            Replacement(
                default_planner,
                "create_default_local_save_plan",
                _saving,
                "plain tensors of one name count as copies, of which one rank's is written",
            ),
        )
    )


def _clipping(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def checked(parameters: Any, *arguments: Any, **options: Any) -> None:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(is_part(parameter) for parameter in found):
            raise ConfigError(
                "torch.nn.utils.clip_grad_norm_",
                "parameters of hp_fully_shard",
                "the norm is that of this rank's shards alone, so that every rank would scale by another factor",
                "hp_muon_plugin.fsdp.norms.clip_grad_norm_(model, max_norm); or leave it out with hp_muon, whose "
                "optimizer.clip_grad clips by the whole norm",
            )
        original(found, *arguments, **options)

    return checked


def _unscaling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def checked(self: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        is_plain = type(self).unscale_ is torch.amp.GradScaler.unscale_  # another one may ask the other ranks itself
        if is_plain and any(is_part(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                type(self).__name__,
                type(optimizer).__name__,
                "looks for overflow in this rank's shards alone, so that ranks would leave out different steps",
                "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which asks all ranks",
            )
        return original(self, optimizer, *arguments, **options)

    return checked


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def checked(state_dict: dict[str, Any], is_coordinator: bool) -> Any:
        places = _places()
        for name, value in state_dict.items():
            is_plain = type(value) in (torch.Tensor, nn.Parameter)
            if is_plain and value.numel() and (value.device, value.data_ptr()) in places:
                raise ConfigError(
                    "torch.distributed.checkpoint",
                    name,
                    "is this rank's shard, and torch takes plain tensors of one name for copies: it would keep one "
                    "rank's and lose the others",
                    "save hp_muon_plugin.fsdp.whole.full_state_dict(model), or each rank's state_dict() in a file of "
                    "its own with torch.save",
                )
        return original(state_dict, is_coordinator)

    return checked


def _places() -> set[tuple[torch.device, int]]:
    """Where shards and their optimizers' states lie. Scalars are the same on all ranks, as counts of steps."""
    shards = [p for module in _MODULES for p in module._parameters.values() if p is not None and is_part(p)]
    states = [
        value
        for optimizer in stepped_optimizers()
        for parameter, state in optimizer.state.items()
        if is_part(parameter)
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return {(value.device, value.data_ptr()) for value in [*shards, *states] if value.numel()}
