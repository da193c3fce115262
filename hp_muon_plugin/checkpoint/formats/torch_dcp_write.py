"""Writer of Megatron's ``torch_dcp``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, Momentum, Source, Target
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    check_momentum,
    full_precision,
    kinds_by_name,
    momentum_factor,
    momentum_of,
    record,
    stored_weight,
)
from hp_muon_plugin.checkpoint.formats.dcp_tree import DcpTree, dcp_tree
from hp_muon_plugin.checkpoint.formats.fsdp2_write import extra_states
from hp_muon_plugin.checkpoint.formats.integer_state import split_optimizers
from hp_muon_plugin.checkpoint.formats.megatron_run import put_run_state
from hp_muon_plugin.checkpoint.formats.random_states import megatron_random, random_losses
from hp_muon_plugin.checkpoint.formats.spelling import spelling
from hp_muon_plugin.checkpoint.formats.torch_dcp import NAME
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.checkpoint.step_counts import StepPlace, fused_values, group_value, inexact, wanted_place

_NO_STATE = (Kind.weight, Kind.main, Kind.buffer)


class TorchDcpWriter:
    """Writes what Megatron loads with ``--use-torch-fsdp2 --ckpt-format torch_dcp``."""

    format = NAME

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        check_momentum(source, target, Momentum.average)
        rounded = wanted_place(source, target) is StepPlace.parameter
        return [*random_losses(source.state(), [(0, 0)]), *(inexact(source.state()) if rounded else ())]

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        with dcp_tree(folder, target, count, budget) as tree:
            self._write(tree, source, target)

    def _write(self, tree: DcpTree, source: Source, target: Target) -> None:
        state = source.state()
        kinds = kinds_by_name(source)
        spell = spelling(source, target)
        order = sorted(kinds, key=lambda name: registration_order(spell(name)))
        for name in order:
            buffer = Key(name, Kind.buffer)
            whole = lazy.canonical(source, buffer) if Kind.buffer in kinds[name] else stored_weight(source, name)
            tree.tensor(("model", spell(name)), whole)
        for module in extra_states({spell(name): [name] for name in order}):
            tree.value(("model", module), None)
        params = [name for name in order if Kind.buffer not in kinds[name]]
        optimizers = split_optimizers(state, params, frozenset()) if state.hyper else []
        for index, groups in enumerate(optimizers):
            root = ("optimizer", index) if len(optimizers) > 1 else ("optimizer",)
            _put_optimizer(tree, source, target, root, groups, kinds)
        put_run_state(tree, source, target, NAME)
        for values in megatron_random(state, [(0, 0)]).values():
            tree.nested(("rng_state", 0), values)
        members = [[spell(name) for name in owned] for groups in optimizers for _, owned in groups]
        kept = record(source, momentum_of(source, target, Momentum.average), wanted_place(source, target))
        tree.value((RECORD,), {**kept, "members": members})


def _put_optimizer(
    tree: DcpTree,
    source: Source,
    target: Target,
    root: tuple[Any, ...],
    groups: list[tuple[dict[str, Any], list[str]]],
    kinds: dict[str, list[str]],
) -> None:
    state, place = source.state(), wanted_place(source, target)
    half = any(Kind.main in kinds[name] for _, names in groups for name in names)
    inner = (*root, "optimizer") if half else root
    number = 0
    for index, (values, owned) in enumerate(groups):
        masters = 0
        for name in owned:
            for kind in kinds[name]:
                if kind in _NO_STATE:
                    continue
                factor = momentum_factor(source, target, Momentum.average, name) if kind == Kind.momentum else 1.0
                value = lazy.scaled(lazy.canonical(source, Key(name, kind)), factor)
                tree.tensor((*inner, "state", str(number), kind), value)
            if name in state.steps and place is StepPlace.parameter:
                step = lazy.in_memory(torch.tensor(state.steps[name], dtype=torch.float32))
                tree.tensor((*inner, "state", str(number), "step"), step)
            if Kind.main in kinds[name]:
                tree.tensor((*root, "fp32_from_fp16_params", index, masters), full_precision(source, name))
                masters += 1
            number += 1
        first = number - len(owned)
        for key, value in {**fused_values(values, place), "params": list(range(first, number))}.items():
            tree.value((*inner, "param_groups", index, key), value)
        steps = [state.steps[name] for name in owned if name in state.steps]
        if steps and place is not StepPlace.parameter:
            tree.nested((*inner, "param_groups", index, "step"), group_value(max(steps), place))
