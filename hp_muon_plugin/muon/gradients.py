"""Are the gradients of this step usable, and how large are they? One answer, the same on every rank.

A gradient that is missing on one rank and present on another would make ranks call different
collectives and hang, or pair the wrong tensors. A NaN that enters the momentum never leaves it.
Both are decided here, before any state changes, together with the norms that clipping needs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.config.choices import MissingGrad, NonFinite
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.clipping import GradNorms, norms_of
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.platform.collectives import AxisGroup, all_reduce_max, all_reduce_sum, group_device

_SHOWN = 5
_ALGORITHMS = (Algorithm.muon, Algorithm.adamw)


@dataclass(frozen=True, slots=True)
class Gradient:
    """What the check looks at of one parameter.

    Attributes:
        name: Name of the parameter.
        value: This rank's (part of the) gradient, or None.
        algorithm: Who updates the parameter.
        axis: Axis over which ranks hold parts of it, or None where each holds the whole.
        is_expected: Whether this rank should have one; False where another replica updates the parameter, and where
            this rank holds nothing of it.
    """

    name: str
    value: torch.Tensor | None
    algorithm: Algorithm
    axis: str | None = None
    is_expected: bool = True

    @property
    def is_there(self) -> bool:
        """Whether there is one, of more than no element."""
        return self.value is not None and (self.is_expected or self.value.numel() > 0)

    @property
    def is_missing(self) -> bool:
        """Whether there is none although there should be."""
        return self.value is None and self.is_expected


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What the check found; the same on every rank that agreed.

    Attributes:
        missing: Whether each parameter has no gradient on the ranks that should have one, in order.
        non_finite: Names of this rank's parameters with a NaN or infinite gradient, if any rank has one.
        norms: Norms over all ranks; finite if every gradient on every agreeing rank is.
    """

    missing: tuple[bool, ...]
    non_finite: tuple[str, ...]
    norms: GradNorms

    @property
    def is_finite(self) -> bool:
        """Whether every gradient on every agreeing rank is finite."""
        return self.norms.is_finite


def check_gradients(
    gradients: Sequence[Gradient],
    *,
    agree: Sequence[AxisGroup] = (),
    axes: Mapping[str, AxisGroup] | None = None,
    unfrozen: Sequence[str] = (),
) -> GradientCheck:
    """Look at the gradients of one step.

    With several ranks this is one small all-reduce per axis in ``agree`` and one per axis that
    parameters are split over, and one read of the result by the host: whether to step at all is a
    decision of the program, not of a kernel. A gradient so large that its square overflows, or a
    NaN, costs a second round.

    Args:
        gradients: The parameters, in the same order on every rank of ``agree``.
        agree: Axes over which all ranks must come to the same answer. Gradients are equal there.
        axes: The axes that parameters are split over, by name.
        unfrozen: Parameters that require a gradient now, and did not when the optimizer was built.

    Returns:
        The finding.

    Raises:
        GradientError: On every rank of ``agree``, if a parameter has a gradient on some ranks only, or was unfrozen,
            or is of a kind that neither algorithm takes.
    """
    axes = axes or {}
    present = [gradient for gradient in gradients if gradient.value is not None]
    _refuse_kinds(present)
    device = _device(present, [*agree, *axes.values()])
    squares, doubt = _squares(present, axes, device)
    has = torch.tensor([gradient.is_there for gradient in gradients], dtype=torch.float32, device=device)
    lacks = torch.tensor([gradient.is_missing for gradient in gradients], dtype=torch.float32, device=device)
    grown = torch.tensor([float(bool(unfrozen))], device=device)
    # over each axis of `agree`: (2P + 4,) float32, who has a gradient, who has none, unfrozen, doubt, squares
    votes = torch.cat([has, lacks, grown, doubt, squares.nan_to_num(0.0, posinf=0.0)])
    for axis in agree:
        all_reduce_max(votes, axis)
    answer = votes.tolist()
    if answer[-4]:
        raise unfrozen_error(unfrozen)
    _refuse_torn([gradient.name for gradient in gradients], answer)
    missing = tuple(lacks > 0 for lacks in answer[len(gradients) : 2 * len(gradients)])
    if not answer[-3]:
        return GradientCheck(missing, (), GradNorms.from_squares(*answer[-2:]))
    return _look_closer(missing, present, agree, axes, device)


def _refuse_kinds(present: Sequence[Gradient]) -> None:
    for g in present:
        assert g.value is not None
        if g.value.layout is not torch.strided or g.value.is_complex():
            kind = "complex" if g.value.is_complex() else "sparse"
            raise GradientError(
                f"{g.name}: a {kind} gradient, which neither Muon nor AdamW takes\n"
                "  fix: build its layer with sparse=False and of real numbers, or freeze it (requires_grad=False)"
            )


def _look_closer(
    missing: tuple[bool, ...],
    present: Sequence[Gradient],
    agree: Sequence[AxisGroup],
    axes: Mapping[str, AxisGroup],
    device: torch.device,
) -> GradientCheck:
    """A sum of squares is not finite on some rank: is a gradient bad, or merely huge?"""
    filled = [(g.name, g.value) for g in present if g.value is not None and g.value.numel()]
    peaks = torch.stack([value.abs().max().float() for _, value in filled]).tolist() if filled else []
    bad = tuple(name for (name, _), peak in zip(filled, peaks, strict=True) if not math.isfinite(peak))
    verdict = torch.tensor([float(bool(bad)), max(filter(math.isfinite, peaks), default=0.0)], device=device)
    for axis in (*axes.values(), *agree):  # (2,) float32
        all_reduce_max(verdict, axis)
    any_bad, peak = verdict.tolist()
    if any_bad:
        return GradientCheck(missing, bad, GradNorms(math.nan, math.nan, math.nan))
    squares, _ = _squares(present, axes, device, scale=peak)
    for axis in agree:
        all_reduce_max(squares, axis)  # (2,) float32
    scaled = GradNorms.from_squares(*squares.tolist())
    return GradientCheck(missing, (), GradNorms(peak * scaled.total, peak * scaled.muon, peak * scaled.adamw))


def _squares(
    present: Sequence[Gradient], axes: Mapping[str, AxisGroup], device: torch.device, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares of ``gradient / scale`` for Muon and AdamW, over all parts, and doubt about them.

    Both are float32, ``(2,)`` and ``(1,)``, and the same on all ranks of an axis, also where a NaN is in a
    gradient that each of them holds whole.
    """
    rows = [None, *axes]
    sums = torch.zeros(len(rows) * len(_ALGORITHMS), device=device)
    values: Sequence[torch.Tensor] = [g.value for g in present if g.value is not None]
    if values:
        values = values if scale == 1.0 else torch._foreach_div(list(values), scale)
        places = [
            rows.index(g.axis if g.axis in axes else None) * len(_ALGORITHMS) + _ALGORITHMS.index(g.algorithm)
            for g in present
        ]
        norms = torch.stack(norms_of(values))
        sums.index_add_(0, torch.tensor(places, device=device), norms.square())
    table = sums.view(len(rows), len(_ALGORITHMS))
    doubt = (~torch.isfinite(sums)).any().float().reshape(1)
    for row, axis in enumerate(axes.values(), start=1):
        shared = torch.cat([table[row], doubt])
        all_reduce_sum(shared, axis)  # (3,) float32 over the ranks that hold the parts
        table[row], doubt = shared[:2], shared[2:]
    return table.sum(dim=0), (doubt + (~torch.isfinite(table)).any()).clamp(max=1.0)


def _device(present: Sequence[Gradient], reduced_over: Sequence[AxisGroup]) -> torch.device:
    if present:
        assert present[0].value is not None
        return present[0].value.device
    return group_device(reduced_over[0]) if reduced_over else torch.device("cpu")


def _refuse_torn(names: Sequence[str], answer: Sequence[float]) -> None:
    torn = [name for i, name in enumerate(names) if answer[i] and answer[len(names) + i]]
    if torn:
        raise GradientError(
            f"{listed(torn)}: gradient on some ranks and none on others\n"
            "  fix: let every rank use the parameter, or freeze it (requires_grad=False) on all of them"
        )


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
    if missing == MissingGrad.error and absent:
        raise missing_error(absent)
    if non_finite == NonFinite.error and not check.is_finite:
        raise non_finite_error(check.non_finite)


def missing_error(names: Sequence[str]) -> GradientError:
    """The error of ``optimizer.missing_grad=error``.

    Args:
        names: This rank's parameters without a gradient; empty where only another rank has one.

    Returns:
        The error.
    """
    return GradientError(
        f"{listed(names) or OF_ANOTHER_RANK}: no gradient (optimizer.missing_grad=error)\n"
        "  fix: use the parameter in the loss, freeze it, or set optimizer.missing_grad=leave"
    )


def non_finite_error(names: Sequence[str]) -> GradientError:
    """The error of ``optimizer.non_finite=error``.

    Args:
        names: This rank's parameters with a bad gradient; empty where only another rank has one.

    Returns:
        The error.
    """
    return GradientError(
        f"{listed(names) or OF_ANOTHER_RANK}: gradient is NaN or infinite "
        "(optimizer.non_finite=error); no weight and no state was changed\n"
        "  fix: lower the learning rate, look at the data of this step, or set optimizer.non_finite=skip"
    )


def unfrozen_names(specs: Mapping[torch.nn.Parameter, ParamSpec]) -> list[str]:
    """Parameters that require a gradient now, and did not when the optimizer was built.

    Args:
        specs: Specs from then, of all parameters of the model.

    Returns:
        Names.
    """
    return [spec.name for param, spec in specs.items() if param.requires_grad and not spec.trainable]


def unfrozen_error(names: Sequence[str]) -> GradientError:
    """The error of a parameter that would never be updated, without a word.

    Args:
        names: This rank's parameters that were unfrozen; empty where only another rank has one.

    Returns:
        The error.
    """
    return GradientError(
        f"{listed(names) or OF_ANOTHER_RANK}: requires a gradient now, but was frozen when the optimizer was built, "
        "so it has no route, no place in the plan and no state\n"
        "  fix: build the optimizer after unfreezing, or freeze the parameter again (requires_grad=False)"
    )


OF_ANOTHER_RANK = "a parameter of another rank"


def listed(names: Sequence[str]) -> str:
    """The first few names, for messages.

    Args:
        names: Parameter names.

    Returns:
        ``a, b and 3 more``; empty for none.
    """
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
