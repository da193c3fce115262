"""The global gradient norm and the count of zeros, each gradient counted once over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import param_is_not_shared

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.muon.clipping import GradNorms
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.platform.collectives import all_reduce_sum, group_device


@dataclass(frozen=True, slots=True)
class CountedParam:
    """One parameter and whether this rank counts its gradient.

    Attributes:
        spec: The parameter.
        main: The tensor whose ``.grad`` the optimizer reads.
        algorithm: Who updates it.
        is_counted: False on all but one of the ranks that hold the same values.
    """

    spec: ParamSpec
    main: torch.nn.Parameter
    algorithm: Algorithm
    is_counted: bool


def counts_here(param: torch.nn.Parameter, spec: ParamSpec, groups: MegatronGroups) -> bool:
    """Whether this rank counts a parameter in norms.

    Data-parallel ranks hold the same gradients and do not add up, so only tensor-parallel copies
    and tied weights matter.

    Args:
        param: The model's parameter.
        spec: Its spec.
        groups: Megatron's groups.

    Returns:
        True if its part of the weight is its own, or it is the first of those that hold a copy.
    """
    if not param_is_not_shared(param):
        return False
    axis = groups.etp if spec.is_expert else groups.tp
    return spec.split is not None or axis.index == 0


def grad_norms(
    params: Sequence[CountedParam], groups: MegatronGroups, complaints: torch.Tensor | None = None
) -> tuple[GradNorms, tuple[int, ...]]:
    """Norms over the whole model, and complaints of all ranks; the same on every rank.

    Two all-reduces of a few numbers each, and one read by the host, because Megatron's contract
    returns the norm as a number and a step with a bad gradient is not taken.

    Args:
        params: This rank's parameters.
        groups: Megatron's groups.
        complaints: ``(C,)`` float32, reasons of this rank against the step, equal on data-parallel ranks.

    Returns:
        The norms, and for each reason whether a rank has it (a number above 0).
    """
    device = _device(params, groups)
    own = torch.zeros(0, device=device) if complaints is None else complaints.to(device)
    sums = torch.zeros(2 + own.numel(), device=device)
    for is_expert, axes in groups.stats:
        both = [_square(params, name, is_expert, device) for name in (Algorithm.muon, Algorithm.adamw)]
        stats = torch.cat([torch.stack(both), own])
        for axis in axes:
            if axis.size > 1:
                all_reduce_sum(stats, axis)  # (2 + C,) float32 over the ranks that together hold each such weight once
        sums += stats
    muon, adamw, *counts = sums.tolist()
    return GradNorms.from_squares(muon, adamw), tuple(int(count) for count in counts)


def _device(params: Sequence[CountedParam], groups: MegatronGroups) -> torch.device:
    """Of the parameters; a pipeline stage that holds none asks its group's backend."""
    return params[0].main.device if params else group_device(groups.dense_stats)


def _square(
    params: Sequence[CountedParam], algorithm: Algorithm, is_expert: bool, device: torch.device
) -> torch.Tensor:
    grads = [
        param.main.grad
        for param in params
        if param.is_counted and param.algorithm is algorithm and param.spec.is_expert == is_expert
    ]
    present = [grad for grad in grads if grad is not None]
    if not present:
        return torch.zeros((), device=device)
    return torch.stack([norm.float() for norm in torch._foreach_norm(present)]).square().sum()


def num_zeros(params: Sequence[CountedParam], groups: MegatronGroups) -> int:
    """Zeros in the gradients of the whole model; the same on every rank.

    Args:
        params: This rank's parameters.
        groups: Megatron's groups.

    Returns:
        The count.
    """
    device = _device(params, groups)
    total = 0
    for is_expert, axes in groups.stats:
        zeros = torch.zeros((), dtype=torch.int64, device=device)
        for param in params:
            if param.is_counted and param.spec.is_expert == is_expert and param.main.grad is not None:
                zeros += param.main.grad.numel() - torch.count_nonzero(param.main.grad)
        for axis in axes:
            if axis.size > 1:
                all_reduce_sum(zeros, axis)
        total += int(zeros.item())
    return total
