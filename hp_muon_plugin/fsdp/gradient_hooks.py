"""Hooks that users register for gradients of single parameters.

Autograd runs those of the gathered weights, which nobody but the engine sees. Hooks of shards are run by the engine.
"""

from collections.abc import Iterable

from torch import nn

from hp_muon_plugin.errors import ConfigError


def run_hooks(shards: Iterable[nn.Parameter]) -> None:
    """Run what was registered by ``register_post_accumulate_grad_hook``, as ``fully_shard`` of PyTorch does.

    Args:
        shards: Those whose gradients are reduced.
    """
    for shard in shards:
        for hook in list((shard._post_accumulate_grad_hooks or {}).values()):
            hook(shard)


def refuse_early_hooks(name: str, parameter: nn.Parameter) -> None:
    """Refuse hooks of a parameter whose place a shard is about to take.

    Args:
        name: Its name.
        parameter: The whole one.

    Raises:
        ConfigError: If it has a hook, which nobody would call again.
    """
    if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
        raise ConfigError(
            "module",
            name,
            "has a gradient hook, which would never run: hp_fully_shard puts a shard in its place",
            "call register_post_accumulate_grad_hook on the shard, after hp_fully_shard; it runs once the shard's "
            "gradient is reduced",
        )


def refuse_tensor_hooks(name: str, shard: nn.Parameter) -> None:
    """Refuse hooks that are to change a gradient before it is accumulated: a shard's is never accumulated by autograd.

    Args:
        name: Its name.
        shard: The shard.

    Raises:
        ConfigError: If it has one.
    """
    if shard._backward_hooks:
        raise ConfigError(
            "module",
            name,
            "has a hook by register_hook, which would never run: autograd sees the whole weight, not the shard",
            "use register_post_accumulate_grad_hook, and change .grad there; it runs once that is reduced",
        )
