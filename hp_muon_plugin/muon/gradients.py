"""Are the gradients of this step usable? One answer, the same on every rank.

A gradient that is missing on one rank and present on another would make ranks call different
collectives and hang, or pair the wrong tensors. A NaN that enters the momentum never leaves it.
Both are decided here, before any state changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.config.choices import MissingGrad, NonFinite
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.platform.collectives import AxisGroup, all_reduce_max

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What the check found; the same on every rank that agreed.

    Attributes:
        missing: Whether each parameter has no gradient, in order.
        non_finite: Names of this rank's parameters with a NaN or infinite gradient, if any rank has one.
        is_finite: Whether every gradient on every agreeing rank is finite.
    """

    missing: tuple[bool, ...]
    non_finite: tuple[str, ...]
    is_finite: bool


def check_gradients(
    names: Sequence[str], grads: Sequence[torch.Tensor | None], *, agree: Sequence[AxisGroup] = ()
) -> GradientCheck:
    """Look at the gradients of one step.

    With several ranks this is one small all-reduce per axis in ``agree``, and one read of its
    result by the host: whether to step at all is a decision of the program, not of a kernel.

    Args:
        names: Parameter names, the same list on every rank of ``agree``.
        grads: This rank's gradients, or None.
        agree: Axes over which all ranks must come to the same answer.

    Returns:
        The finding.

    Raises:
        GradientError: On every rank of ``agree``, if a parameter has a gradient on some ranks only.
    """
    present = [grad for grad in grads if grad is not None]
    device = present[0].device if present else torch.device("cpu")
    largest = [x.float() for x in torch._foreach_norm(present, ord=math.inf)] if present else []
    bad = ~torch.isfinite(torch.stack(largest)) if largest else torch.zeros(0, dtype=torch.bool, device=device)
    has = torch.tensor([grad is not None for grad in grads], dtype=torch.int32, device=device)
    votes = torch.cat([has, 1 - has, bad.any().int().reshape(1)])  # (2P + 1,) int32
    for axis in agree:
        all_reduce_max(votes, axis)
    answer = votes.tolist()
    count = len(names)
    torn = [name for i, name in enumerate(names) if answer[i] and answer[count + i]]
    if torn:
        raise GradientError(
            f"{listed(torn)}: gradient on some ranks and none on others\n"
            "  fix: let every rank use the parameter, or freeze it (requires_grad=False) on all of them"
        )
    bad_names = _bad_names(names, grads, bad) if answer[-1] else ()
    return GradientCheck(tuple(grad is None for grad in grads), bad_names, not answer[-1])


def refuse(check: GradientCheck, names: Sequence[str], *, missing: MissingGrad, non_finite: NonFinite) -> None:
    """Raise what the configuration says is an error.

    Args:
        check: The finding.
        names: Parameter names, in order.
        missing: What a missing gradient does.
        non_finite: What a NaN or infinite gradient does.

    Raises:
        GradientError: Naming the parameters.
    """
    absent = [name for name, is_missing in zip(names, check.missing, strict=True) if is_missing]
    if missing is MissingGrad.error and absent:
        raise GradientError(
            f"{listed(absent)}: no gradient (optimizer.missing_grad=error)\n"
            "  fix: use the parameter in the loss, freeze it, or set optimizer.missing_grad=leave"
        )
    if non_finite is NonFinite.error and not check.is_finite:
        raise GradientError(
            f"{listed(check.non_finite) or 'a parameter of another rank'}: gradient is NaN or infinite "
            "(optimizer.non_finite=error); no weight and no state was changed\n"
            "  fix: lower the learning rate, look at the data of this step, or set optimizer.non_finite=skip"
        )


def _bad_names(names: Sequence[str], grads: Sequence[torch.Tensor | None], bad: torch.Tensor) -> tuple[str, ...]:
    present = [name for name, grad in zip(names, grads, strict=True) if grad is not None]
    return tuple(name for name, is_bad in zip(present, bad.tolist(), strict=True) if is_bad)


def listed(names: Sequence[str]) -> str:
    """The first few names, for messages.

    Args:
        names: Parameter names.

    Returns:
        ``a, b and 3 more``; empty for none.
    """
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
