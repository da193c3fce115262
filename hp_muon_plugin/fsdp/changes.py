"""What users do to shards between steps: other weights, cleared or replaced gradients, frozen parameters.

Weights and reduced gradients lie in buffers that collectives read. A shard or a gradient that no longer
lies there would be trained and never sent, so both are looked at before they are used.
"""

from typing import NoReturn

import torch

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.gradient_hooks import refuse_tensor_hooks
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.unit import Unit


def take_weights(unit: Unit) -> None:
    """Bring the buffers of a unit up to date with its shards, wherever those lie by now. The unit is sharded.

    Args:
        unit: The unit.

    Raises:
        ConfigError: If a parameter was replaced, unfrozen, or brought to another type, device or shape.
    """
    for bucket in unit.buckets:
        first, size = bucket.master.data_ptr(), bucket.master.element_size()
        for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
            sharded = parameter.sharded
            for module, attribute in parameter.places:
                if module._parameters.get(attribute) is not sharded:
                    _refuse(
                        unit,
                        parameter,
                        "was replaced after hp_fully_shard, which would go on with the one before",
                        "replace, tie or remove parameters first, or write into the shard",
                    )
            if sharded.requires_grad and not bucket.is_trainable:
                _refuse(
                    unit,
                    parameter,
                    "requires a gradient now, and was frozen when hp_fully_shard took it",
                    "unfreeze it first, or freeze it again (requires_grad=False)",
                )
            refuse_tensor_hooks(f"{unit.name}.{parameter.name}", sharded)
            is_moved = sharded.data_ptr() != first + place * size and bool(sharded.numel())
            if is_moved or sharded.dtype is not bucket.master.dtype:
                _take_moved(unit, bucket, parameter, place)


def _take_moved(unit: Unit, bucket: Bucket, parameter: Parameter, place: int) -> None:
    sharded, master = parameter.sharded, bucket.master
    if sharded.dtype is not master.dtype or sharded.device != master.device:
        _refuse(
            unit,
            parameter,
            f"is {sharded.dtype} on {sharded.device} now, and was {master.dtype} on {master.device} when "
            "hp_fully_shard took it",
            "bring the model to its type and device first; mp_policy=MixedPrecision(...) chooses in what to compute",
        )
    info = sharded.hp_shard  # type: ignore[attr-defined]
    if sharded.numel() != info.stop - info.start:
        _refuse(
            unit,
            parameter,
            f"has shape {tuple(sharded.shape)} now, and this rank holds {info.stop - info.start} of its elements",
            "assign this rank's shard, or load whole weights with fsdp.whole.load_full_state_dict",
        )
    flat = master[place : place + sharded.numel()]
    flat.copy_(sharded.detach().reshape(-1))
    sharded.data = flat.view(sharded.shape)


def take_grads(bucket: Bucket, added: torch.Tensor) -> None:
    """Bring the buffer of reduced gradients to what the shards' ``grad`` is, before a micro-batch is added to it.

    An optimizer clears the gradients of its own parameters, which need not be all of a bucket, and users
    write others.

    Args:
        bucket: The bucket.
        added: ``(shard_numel,)`` the micro-batch's gradients. What is frozen takes nothing of it.
    """
    assert bucket.grad is not None
    for index, (parameter, place) in enumerate(zip(bucket.parameters, bucket.places, strict=True)):
        sharded = parameter.sharded
        held = bucket.grad[place : place + sharded.numel()]
        if not sharded.requires_grad:
            added[place : place + sharded.numel()].zero_()
        if sharded.grad is None:
            held.zero_()
        elif not bucket.is_published(index, sharded.grad):
            held.copy_(sharded.grad.reshape(-1))


def _refuse(unit: Unit, parameter: Parameter, why: str, fix: str) -> NoReturn:
    raise ConfigError("module", f"{unit.name}.{parameter.name}", why, fix)
