"""Norm of all gradients of a sharded model, and clipping by it. Every gradient counts once."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.roots import schedule_of
from hp_muon_plugin.fsdp.schedule import Schedule
from hp_muon_plugin.muon.clipping import norms_of
from hp_muon_plugin.platform.collectives import AxisGroup, all_reduce_max, all_reduce_sum

AxesOf = Callable[[nn.Parameter], Sequence[AxisGroup]]


def grad_norm(module: nn.Module, *, norm_type: float = 2.0, axes_of: AxesOf | None = None) -> torch.Tensor:
    """Norm of the gradients of all shards of a model.

    Gradients of sharded parameters are summed over their shard axis, those of replicated parameters
    are counted once, and where replicas own different parameters these are summed over replicas. All
    ranks of the model must call it.

    Args:
        module: A root, after a backward pass that reduced gradients.
        norm_type: 2 or ``inf``.
        axes_of: Further axes over which ranks hold different parts of a parameter, such as those of
            tensor and expert parallelism. None: there are none.

    Returns:
        0-dim float32, the same on every rank. Nothing is read by the host.

    Raises:
        ConfigError: If there is no such norm.
    """
    schedule = schedule_of(module)
    is_max = norm_type == float("inf")
    if not is_max and norm_type != 2.0:
        raise ConfigError("norm_type", norm_type, "is neither 2 nor infinity", "norm_type=2.0 or norm_type=math.inf")
    total = torch.zeros((), device=schedule.device)
    for axes, grads in _by_axes(schedule, axes_of).items():
        part = torch.zeros((), device=schedule.device)
        norms = norms_of(grads, norm_type)
        if norms:
            stacked = torch.stack(norms)
            part = stacked.max() if is_max else stacked.square().sum()
        for axis in axes:  # 4 bytes; the host does not wait
            (all_reduce_max if is_max else all_reduce_sum)(part, axis)
        total = torch.maximum(total, part) if is_max else total + part
    return total if is_max else total.sqrt()


def _by_axes(schedule: Schedule, axes_of: AxesOf | None) -> dict[tuple[AxisGroup, ...], list[torch.Tensor]]:
    """Gradients by the axes over which they are summed. The keys are the same on all ranks, in one order."""
    found: dict[tuple[AxisGroup, ...], list[torch.Tensor]] = {}
    for unit in schedule.units:
        for bucket in unit.trainable:
            owners = schedule.reducer.group_of(bucket).mode is not OuterMode.replicate
            own = (bucket.shard_axis, *([bucket.mesh.replicate] if owners else []))
            for parameter in bucket.parameters:
                axes = (*own, *(axes_of(parameter.sharded) if axes_of else ()))
                grads = found.setdefault(axes, [])
                grad = parameter.sharded.grad
                if grad is not None and grad.numel():
                    grads.append(grad)
    return found


def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, norm_type: float = 2.0, axes_of: AxesOf | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        module: A root, after a backward pass that reduced gradients.
        max_norm: Largest norm.
        norm_type: 2 or ``inf``.
        axes_of: See :func:`grad_norm`.

    Returns:
        0-dim float32, the norm before.
    """
    total = grad_norm(module, norm_type=norm_type, axes_of=axes_of)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    grads = [grad for grad in _all_grads(schedule_of(module)) if grad.numel()]
    if grads:
        torch._foreach_mul_(grads, factor)
    return total


def _all_grads(schedule: Schedule) -> Iterable[torch.Tensor]:
    for unit in schedule.units:
        for bucket in unit.trainable:
            for parameter in bucket.parameters:
                if parameter.sharded.grad is not None:
                    yield parameter.sharded.grad
