"""Writer of torch FSDP2 checkpoints."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    check_momentum,
    groups_of,
    kinds_by_name,
    masters_round_to_weights,
    momentum_factor,
    momentum_of,
    record,
)
from hp_muon_plugin.checkpoint.formats.dcp_tree import DcpTree, dcp_tree
from hp_muon_plugin.checkpoint.formats.fsdp2 import NAME
from hp_muon_plugin.checkpoint.formats.spelling import prediction
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.checkpoint.step_counts import inexact
from hp_muon_plugin.errors import ConfigError

_STACKABLE = re.compile(r"^(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
_LINEAR = re.compile(r"^((?:.*\.)?(?:linear_\w+|output_layer|eh_proj))\.weight$")


class Fsdp2Writer:
    """Writes ``model.<name>``, ``optim.state.<name>.<kind>``, ``optim.param_groups``, ``lr_scheduler``, ``iteration``.

    Weights are written as masters, which mixed precision of ``fully_shard`` keeps. Options: ``style`` is ``nested``
    or ``flat`` (``flatten_optimizer_state_dict``), ``experts`` is ``separate`` or ``stacked`` ([E, M, N]).
    """

    format = NAME

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        check_momentum(source, target, None)
        return inexact(source.state())

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        with dcp_tree(folder, target, count, budget) as tree:
            self._write(tree, source, target)

    def _write(self, tree: DcpTree, source: Source, target: Target) -> None:
        state = source.state()
        flat = _wants(source, target, "style", "flat", "flat_optimizer")
        stacked = _wants(source, target, "experts", "stacked", "stacked_experts")
        stacks = (
            stacks_of(source)
            if stacked
            else {name: [name] for name in sorted(kinds_by_name(source), key=registration_order)}
        )
        spell = prediction(source, target)
        stacks = {spell(name): singles for name, singles in stacks.items()}
        kinds = kinds_by_name(source)
        for name, singles in stacks.items():
            tree.tensor(("model", name), _joined([_model_tensor(source, single, kinds) for single in singles], name))
        for module in extra_states(stacks):
            tree.value(("model", module), None)
        for name, singles in stacks.items():
            for kind, value in state_tensors(source, target, name, singles, kinds):
                tree.tensor(("optim", f"state.{name}.{kind}") if flat else ("optim", "state", name, kind), value)
        hyper = {name: state.hyper[singles[0]] for name, singles in stacks.items() if singles[0] in state.hyper}
        put_groups(tree, hyper, list(stacks), flat)
        tree.nested(("lr_scheduler",), state.scheduler)
        tree.value(("iteration",), state.iteration)
        tree.value((RECORD,), record(source, momentum_of(source, target, None)))


def stacks_of(source: Source) -> dict[str, list[str]]:
    """Names with routed experts stacked, each with the single names that it stands for, in the model's order."""
    found: dict[str, dict[int, str]] = {}
    for name in sorted(kinds_by_name(source), key=registration_order):
        match = _STACKABLE.match(name)
        if match:
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        else:
            found[name] = {0: name}
    return {name: [items[index] for index in sorted(items)] for name, items in found.items()}


def extra_states(stacks: dict[str, list[str]]) -> list[str]:
    """Keys of Megatron modules that have an empty extra state, which loaders ask for."""
    found = [
        f"{match[1]}.{names.EXTRA_STATE}"
        for name, singles in stacks.items()
        if (match := _LINEAR.match(name)) and len(singles) == 1 and _is_megatron(name)
    ]
    if names.EMBEDDING in stacks and names.OUTPUT not in stacks:
        found.append(f"output_layer.{names.EXTRA_STATE}")  # tied: the module is there without a weight of its own
    return found


def state_tensors(
    source: Source, target: Target, name: str, singles: list[str], kinds: dict[str, list[str]]
) -> list[tuple[str, Lazy]]:
    """Optimizer state of a parameter or of a stack of experts, with the step.

    Args:
        source: The checkpoint.
        target: For the convention of momentum.
        name: Its name.
        singles: What it stands for.
        kinds: Kinds of tensors of every name.
    """
    state = source.state()
    found: list[tuple[str, Lazy]] = []
    for kind in kinds[singles[0]]:
        if kind in (Kind.weight, Kind.main, Kind.buffer):
            continue
        factor = momentum_factor(source, target, None, singles[0]) if kind == Kind.momentum else 1.0
        parts = [lazy.scaled(lazy.canonical(source, Key(single, kind)), factor) for single in singles]
        found.append((kind, _joined(parts, name)))
    steps = {state.steps[single] for single in singles if single in state.steps}
    if len(steps) > 1:
        raise ConfigError(
            "--option experts",
            "stacked",
            f"experts of {name} have done different numbers of steps",
            "--option experts=separate",
        )
    if steps:
        found.append(("step", lazy.in_memory(torch.tensor(steps.pop(), dtype=torch.float32))))
    return found


def put_groups(tree: DcpTree, hyper: dict[str, dict[str, Any]], order: list[str], flat: bool) -> None:
    """Write parameter groups, nested or one entry per parameter."""
    if flat:
        for name in order:
            for key, value in hyper.get(name, {}).items():
                tree.value(("optim", f"param_groups.{name}.{key}"), value)
        return
    for index, (values, members) in enumerate(groups_of(hyper, [name for name in order if name in hyper])):
        for key, value in {**values, "params": members}.items():
            tree.value(("optim", "param_groups", index, key), value)


def _is_megatron(name: str) -> bool:
    return name.startswith(("decoder.", "mtp.", "output_layer."))


def _model_tensor(source: Source, name: str, kinds: dict[str, list[str]]) -> Lazy:
    if Kind.buffer in kinds[name]:
        return lazy.canonical(source, Key(name, Kind.buffer))
    return masters_round_to_weights(source, name)


def _joined(parts: list[Lazy], name: str) -> Lazy:
    return parts[0] if not _is_stack(name) else lazy.stack_of(parts)


def _is_stack(name: str) -> bool:
    return re.search(r"\.experts\.linear_fc[12]\.(weight|bias)$", name) is not None


def _wants(source: Source, target: Target, option: str, choice: str, fact: str) -> bool:
    """Whether a choice is taken: by the option, or because the source was so."""
    value = target.options.get(option)
    return bool(source.state().model.get(fact)) if value is None else value == choice
