"""Moving averages of gradients."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.muon.executor import ParamStep


def update_momenta(steps: Sequence[ParamStep]) -> None:
    """``momentum <- beta * momentum + (1 - beta) * grad``, for whole lists of one type and beta at a time.

    Args:
        steps: What is updated, in place.
    """
    same: dict[float, list[ParamStep]] = {}
    for step in steps:
        if step.grad.dtype is step.momentum.dtype:
            same.setdefault(step.beta, []).append(step)
        else:
            step.momentum.mul_(step.beta).add_(step.grad, alpha=1 - step.beta)
    for beta, alike in same.items():
        torch._foreach_lerp_([step.momentum for step in alike], [step.grad for step in alike], 1 - beta)
