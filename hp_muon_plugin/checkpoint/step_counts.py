"""Where an Adam keeps its step count, and as what.

torch keeps a float32 tensor with each parameter. The fused Adams of Apex and Transformer Engine keep an int in the
parameter group: their kernel takes no float, and Transformer Engine refuses state that it does not know. MindSpeed's
AdamW keeps an int64 tensor in the group, and asks it for its device. Megatron's loader hands each what the
checkpoint holds, so a count in the wrong place is lost or stops training.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Loss, RunState, Source, Target
from hp_muon_plugin.checkpoint.run_values import number
from hp_muon_plugin.errors import ConfigError

FACT = "step_place"
"""Under which :attr:`RunState.model` has the place."""
OPTION = "step"


class StepPlace(StrEnum):
    """Where a step count is."""

    parameter = "parameter"
    group = "group"
    group_tensor = "group_tensor"


def place_in(groups: Iterable[Mapping[str, Any]]) -> StepPlace | None:
    """The place that steps of param groups tell, or None if no group has one.

    A float is torch's own count, which Megatron's distributed optimizer copied into the group.

    Args:
        groups: As stored.
    """
    for group in groups:
        step = group.get("step")
        if isinstance(step, torch.Tensor):
            return StepPlace.group_tensor
        if isinstance(step, int | float):
            return StepPlace.parameter if isinstance(step, float) else StepPlace.group
    return None


def note_place(state: RunState, place: StepPlace | None) -> None:
    """Keep the place among the facts of the run, unless a record of ours has told it.

    Args:
        state: Changed.
        place: Of the checkpoint that was read, if it has one.
    """
    if place is not None:
        state.model.setdefault(FACT, str(place))


def take_group_steps(state: RunState, with_adam: Collection[str]) -> StepPlace | None:
    """Make counts that stand among values of groups the steps of their parameters.

    Args:
        state: Changed; its steps are those that stood with parameters.
        with_adam: Parameters that have Adam's moments.

    Returns:
        The place of the counts, or None if there are none.
    """
    place = StepPlace.parameter if state.steps else place_in(state.hyper.values())
    for name, values in state.hyper.items():
        step = live_step(state.steps.get(name), values.pop("step", None))
        if step is not None and name in with_adam:
            state.steps[name] = step
    return place


def wanted_place(source: Source, target: Target) -> StepPlace:
    """Where a writer puts step counts: as the option says, else as the source had them, else with parameters.

    Args:
        source: The checkpoint.
        target: Its option ``step``.

    Raises:
        ConfigError: If the option is no place.
    """
    value = target.options.get(OPTION) or source.state().model.get(FACT) or StepPlace.parameter
    if value not in list(StepPlace):
        raise ConfigError(f"--option {OPTION}", value, "no place of a step count", f"one of {', '.join(StepPlace)}")
    return StepPlace(value)


def live_step(*counts: Any) -> float | None:
    """The count that an optimizer goes on from, of those that a checkpoint has for it.

    One that was loaded and is used no more stays behind in later checkpoints, so the largest is alive.

    Args:
        counts: Numbers, tensors of one element, or None.
    """
    found = [number(count) for count in counts if count is not None]
    return max(found) if found else None


def group_value(step: float, place: StepPlace) -> int | float | torch.Tensor:
    """A count as a param group has it.

    Args:
        step: The count.
        place: A tensor for ``group_tensor``, else a number; torch takes an int as well.
    """
    if place is StepPlace.group_tensor:
        return torch.tensor(int(step), dtype=torch.int64)
    return int(step) if step == int(step) else step


def fused_values(values: Mapping[str, Any], place: StepPlace) -> dict[str, Any]:
    """Values of a group with what fused Adams ask for beyond torch's; those of others as they are.

    Args:
        values: Of a group.
        place: Where the reader keeps steps.
    """
    if place is StepPlace.parameter or "betas" not in values:
        return dict(values)
    return {"bias_correction": True, **values}


def with_step(group: dict[str, Any], place: StepPlace) -> dict[str, Any]:
    """A param group as a distributed optimizer has it.

    Args:
        group: Its values; ``step`` as a number.
        place: Where the reader's Adam keeps steps.
    """
    step = {"step": group_value(group["step"], place)} if "step" in group else {}
    return {**fused_values(group, place), **step}


def inexact(state: RunState) -> list[Loss]:
    """One line if a float32, as torch keeps beside a parameter, is not the step count of each parameter.

    Args:
        state: Of the source.
    """
    rounded = {step: torch.tensor(step, dtype=torch.float32).item() for step in set(state.steps.values())}
    wrong = [name for name, step in state.steps.items() if rounded[step] != step]
    if not wrong:
        return []
    step = state.steps[wrong[0]]
    text = f"step counts of {len(wrong)} parameters: this form has float32, in which {step:.0f} is {rounded[step]:.0f}"
    return [Loss(text, steps=wrong)]
