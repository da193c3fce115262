"""torch optimizer states under integer ids, as Megatron keeps them: names found again, and given up again.

Megatron's optimizers of a rank are one or several (expert parameters apart, Muon's apart); each numbers its
parameters through its groups. A half-precision optimizer has its masters beside it, in lists by group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Kind, RunState
from hp_muon_plugin.checkpoint.formats.base import groups_of
from hp_muon_plugin.checkpoint.formats.group_members import Param, is_muon, members
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.step_counts import StepPlace, live_step, place_in
from hp_muon_plugin.errors import CheckpointError, DamageError


@dataclass(slots=True)
class Optimizer:
    """One torch optimizer of a rank.

    Attributes:
        groups: Values of its parameter groups, without ``params``.
        counts: Parameters of each.
        state: Of each id the tensors by kind; 0-dim ones and numbers as they are.
        masters: Float32 masters, by group.
        half: Whether masters are kept beside the state.
        ids: Ids of each group's parameters.
    """

    groups: list[dict[str, Any]]
    counts: list[int]
    state: dict[int, dict[str, Any]]
    masters: list[list[Lazy]] = field(default_factory=list)
    half: bool = False
    ids: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Named:
    """What a rank's optimizers hold, by the parameter's name on the rank."""

    tensors: dict[tuple[str, str], Lazy] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_place: StepPlace | None = None


def named(
    optimizers: Sequence[Optimizer],
    params: Sequence[Param],
    dtypes: Mapping[str, torch.dtype],
    args: Mapping[str, Any],
    where: str,
    recorded: Any = None,
) -> Named:
    """Give ids their names.

    Args:
        optimizers: Of one rank.
        params: Its parameters, as ``named_parameters()`` has them.
        dtypes: Dtypes of their weights.
        args: Megatron's arguments.
        where: File, for messages.
        recorded: Our record, if we wrote the file: it has the members of each group.

    Raises:
        CheckpointError: If numbers or shapes do not fit: the names would be guesses.
    """
    groups = [group for optimizer in optimizers for group in optimizer.groups]
    told = recorded.get("members") if isinstance(recorded, Mapping) else None
    found = iter(told or members(groups, params, args, where))
    with_parameters = any("step" in kinds for optimizer in optimizers for kinds in optimizer.state.values())
    result = Named(step_place=StepPlace.parameter if with_parameters else place_in(groups))
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.groups):
            owned = next(found)
            if len(owned) != optimizer.counts[index]:
                raise CheckpointError(
                    f"{where}: parameter group {index} has {optimizer.counts[index]} members, but {len(owned)} "
                    f"parameters of the model fit it\n  fix: convert without optimizer state"
                )
            _take_group(result, optimizer, index, group, owned, dtypes)
    shapes = {param.name: param.shape for param in params}
    for (name, kind), tensor in result.tensors.items():
        if tensor.shape != shapes[name]:
            raise DamageError(f"{where}: {kind} of {name} has shape {tensor.shape}, the weight {shapes[name]}")
    return result


def _take_group(
    result: Named,
    optimizer: Optimizer,
    index: int,
    group: dict[str, Any],
    owned: list[str],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    halves = [name for name in owned if dtypes[name] != torch.float32]
    if optimizer.half:
        for name, master in zip(halves, optimizer.masters[index], strict=True):
            result.tensors[name, Kind.main] = master
    for name, number in zip(owned, optimizer.ids[index], strict=True):
        result.hyper[name] = {key: value for key, value in group.items() if key not in ("step", "params")}
        kinds = optimizer.state.get(number, {})
        own = kinds.get("step")
        step = live_step(group.get("step"), own.rows() if isinstance(own, Lazy) else own)
        if step is not None and (own is not None or Kind.exp_avg in kinds):
            result.steps[name] = step
        for kind, value in kinds.items():
            if kind != "step" and isinstance(value, Lazy) and value.shape:
                result.tensors[name, kind] = value


def split_optimizers(
    state: RunState, order: Sequence[str], expert_parallel: frozenset[str]
) -> list[list[tuple[dict[str, Any], list[str]]]]:
    """Groups of each optimizer as Megatron would have them: Muon's, then the others'; experts' apart.

    Args:
        state: Has values of each parameter.
        order: Parameters as ``named_parameters()`` has them.
        expert_parallel: Those that are on some ranks only.

    Returns:
        Of each optimizer the groups with their members. At least one optimizer.
    """
    hyper = state.hyper
    parts: list[list[str]] = [[], [], [], []]
    for name in order:
        parts[2 * (not is_muon(hyper.get(name, {}))) + (name in expert_parallel)].append(name)
    marked = {name: megatron_values(hyper.get(name, {}), state.scheduler, name in expert_parallel) for name in order}
    if parts[0] or parts[1]:  # beside Muon's, Megatron's groups of Adam say whose they are
        for name in order:
            if "betas" in marked[name] and "wd_mult" not in hyper[name]:
                marked[name].setdefault("optimizer", "adam")
    return [groups_of(marked, part) for part in parts if part] or [[]]


def megatron_values(values: Mapping[str, Any], scheduler: Mapping[str, Any], expert_parallel: bool) -> dict[str, Any]:
    """Values of a group with all keys by which Megatron matches groups of a checkpoint with its own.

    A group's own limits go before those of Megatron's arguments, and the rate of the last step is none: where the
    source does not tell them, the schedule's are taken.

    Args:
        values: Of the source, which may be torch's alone.
        scheduler: State of Megatron's schedule; empty if the source has none.
        expert_parallel: Whether the group's parameters are on some ranks only.
    """
    if "wd_mult" in values:
        return {**values, "is_expert_parallel": expert_parallel}
    limits = {key: scheduler[key] for key in ("max_lr", "min_lr") if key in scheduler}
    if "initial_lr" in values and "max_lr" not in limits:
        limits["max_lr"] = values["initial_lr"]
    return {
        "wd_mult": 1.0 if values.get("weight_decay", 0.0) else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        **limits,
        **values,
        "is_expert_parallel": expert_parallel,
    }
