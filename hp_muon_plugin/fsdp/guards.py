"""What torch offers for plain tensors and would do to shards without a word.

A shard is an ordinary parameter, so torch's own tools take it for a whole one, which is the same on every
rank. Some of them then give wrong training; :mod:`hp_muon_plugin.fsdp.saving` has those that give a checkpoint
without most of the model. They refuse shards once ``hp_fully_shard`` was called, and do with all other parameters
what they always did.
"""

import math
import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.parts import is_part, mark_parts, part_gradients
from hp_muon_plugin.fsdp.saving import saving_guards
from hp_muon_plugin.platform.patching import Patcher, Replacement, aliases

_OWN_NORM = "_hp_fsdp_own_norm"
_FIX = (
    "hp_muon_plugin.fsdp.norms.clip_grad_norm_(model, max_norm); or leave it out with hp_muon, whose "
    "optimizer.clip_grad clips by the whole norm"
)


def note_parts(buckets: Iterable[Bucket]) -> None:
    """Mark parameters of which other ranks hold or update other parts, and refuse them where torch misreads them.

    Args:
        buckets: Whose weights are divided.
    """
    mark_parts(buckets)
    _install()


@cache
def _install() -> None:
    Patcher().apply(
        (
            Replacement(
                clip_grad,
                "_clip_grads_with_norm_",
                _clipping,
                "clip_grad_norm_ scales each rank's shards by the norm of these alone. It looks this helper up when it "
                "runs, whoever imported it",
            ),
            *_public("get_total_norm", _measuring, "what it says of shards is not the model's norm"),
            *_public("clip_grads_with_norm_", _scaling, "that norm would be another one on every rank"),
            Replacement(
                torch.amp.GradScaler,
                "_unscale_grads_",
                _unscaling,
                "a rank whose own shards are finite takes a step that another leaves out, and scales differ after it",
            ),
            Replacement(
                DistributedDataParallel,
                "__init__",
                _replicating,
                "it sends rank 0's shards to all other ranks, as their weights",
            ),
            *saving_guards(),
            *_resharding(),
        )
    )


def _public(name: str, make: Callable[[Any], Any], why: str) -> list[Replacement]:
    """Replacements of a function of ``torch.nn.utils`` wherever it was imported by name; older torch has none."""
    function = getattr(torch.nn.utils, name, None)
    if function is None:
        return []
    found = aliases(function, lambda module: module != clip_grad.__name__)  # there it is clip_grad_norm_'s helper
    return [Replacement(module, alias, make, why) for module, alias in found]


def _clipping(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def checked(parameters: Any, *arguments: Any, **options: Any) -> None:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(is_part(parameter) for parameter in found):
            raise ConfigError(
                "torch.nn.utils.clip_grad_norm_",
                "parameters of hp_fully_shard",
                "the norm is that of this rank's shards alone, so that every rank would scale by another factor",
                _FIX,
            )
        original(found, *arguments, **options)

    return checked


def _measuring(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The norm of shards is right for these: it is marked until it is brought together with other ranks'."""

    @wraps(original)
    def marked(tensors: Any, norm_type: float = 2.0, *arguments: Any, **options: Any) -> torch.Tensor:
        found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        own = set(map(id, part_gradients()))
        is_own = any(id(tensor) in own for tensor in found)
        if is_own:
            found = [tensor for tensor in found if tensor.numel()]  # torch refuses a maximum of nothing
        norm = original(found, norm_type, *arguments, **options)
        if is_own and not math.isinf(norm_type):  # a maximum may be all-reduced in place
            setattr(norm, _OWN_NORM, norm._version)
        return norm

    return marked


def _scaling(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def checked(parameters: Any, max_norm: float, total_norm: torch.Tensor, *arguments: Any, **options: Any) -> None:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        is_own = getattr(total_norm, _OWN_NORM, None) == getattr(total_norm, "_version", 0)
        if is_own and any(is_part(parameter) for parameter in found):
            raise ConfigError(
                "torch.nn.utils.clip_grads_with_norm_",
                "what get_total_norm says of parameters of hp_fully_shard",
                "is the norm of this rank's shards alone, so that every rank would scale by another factor",
                _FIX,
            )
        original(found, max_norm, total_norm, *arguments, **options)

    return checked


def _replicating(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def checked(self: Any, module: nn.Module, *arguments: Any, **options: Any) -> None:
        name = next((name for name, parameter in module.named_parameters() if is_part(parameter)), None)
        if name is not None:
            raise ConfigError(
                type(self).__name__,
                name,
                "is a shard of hp_fully_shard, which rank 0 would send to all other ranks as their weights",
                "leave the wrapper out: gradients of hp_fully_shard are averaged; a mesh of two axes replicates",
            )
        original(self, module, *arguments, **options)

    return checked


def _resharding() -> list[Replacement]:
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_init")  # torch's checkpoint imports it
    if not hasattr(module, "_verify_managed_param"):
        return []
    why = "fully_shard asks it of each parameter, and would divide shards, other ones on every rank, once more"
    return [Replacement(module, "_verify_managed_param", _verifying, why)]


def _verifying(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def checked(name: str, param: nn.Parameter) -> None:
        if is_part(param):
            raise ConfigError(
                "torch.distributed.fsdp.fully_shard",
                name,
                "is a shard of hp_fully_shard, which would be divided once more",
                "use one of the two for the whole model",
            )
        original(name, param)

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
