"""What was made before ``hp_fully_shard`` or added after it: it would be trained on one rank alone, or not at all."""

import weakref
from collections.abc import Iterable
from functools import cache
from itertools import count

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hp_muon_plugin.errors import ConfigError

REPLACED = "_hp_fsdp_replaced"
"""Attribute of the whole parameters that units were made from."""

IGNORED = "_hp_fsdp_ignored"
"""Attribute of parameters that a call was told to leave alone."""

_TIMES = count(1)
_last = 0
_SEEN: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()


def note_replaced(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Mark parameters whose place shards have taken, and look for them in every optimizer's next step.

    Args:
        parameters: The whole ones.
    """
    global _last
    for parameter in parameters:
        setattr(parameter, REPLACED, True)
    _last = next(_TIMES)
    _register_hook()


@cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if _SEEN.get(optimizer) == _last:
        return
    if any(hasattr(parameter, REPLACED) for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "optimizer",
            type(optimizer).__name__,
            "was made before hp_fully_shard, which replaced the parameters that it holds: it would update nothing",
            "make the optimizer after the last hp_fully_shard",
        )
    _SEEN[optimizer] = _last


def stepped_optimizers() -> list[torch.optim.Optimizer]:
    """Optimizers that have begun a step since a module was sharded."""
    return list(_SEEN)


def refuse_added(module: torch.nn.Module) -> None:
    """Refuse parameters that no unit has.

    Args:
        module: A root.

    Raises:
        ConfigError: Naming the first one.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "hp_shard") and not hasattr(parameter, IGNORED):
            raise ConfigError(
                "module",
                name,
                "came after hp_fully_shard, so that its gradient would stay this rank's own",
                "add parameters before, or name them in ignored_params",
            )
