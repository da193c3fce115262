"""Writer of ``fsdp_dtensor``, the checkpoints of Megatron-FSDP."""

from collections.abc import Callable
from pathlib import Path

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, Momentum, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    check_momentum,
    kinds_by_name,
    masters_round_to_weights,
    momentum_factor,
    momentum_of,
    record,
)
from hp_muon_plugin.checkpoint.formats.dcp_tree import DcpTree, dcp_tree
from hp_muon_plugin.checkpoint.formats.integer_state import megatron_values
from hp_muon_plugin.checkpoint.formats.megatron_fsdp import NAME
from hp_muon_plugin.checkpoint.formats.megatron_run import put_run_state
from hp_muon_plugin.checkpoint.formats.random_states import megatron_random, random_losses
from hp_muon_plugin.checkpoint.formats.spelling import spelling
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.step_counts import StepPlace, fused_values, group_value, inexact, wanted_place

_STATE_PREFIX = "module.module.module."


class MegatronFsdpWriter:
    """Writes what Megatron-FSDP loads with ``--ckpt-format fsdp_dtensor``.

    Sizes of ranks do not matter to it: torch's planner reads any chunks. Experts carry their global number.
    """

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
        state, place = source.state(), wanted_place(source, target)
        gated, spell = _gated(source), spelling(source, target)
        for name, kinds in kinds_by_name(source).items():
            if Kind.buffer in kinds:
                tree.tensor(("model", f"module.{spell(name)}"), lazy.canonical(source, Key(name, Kind.buffer)))
                continue
            main = lazy.cast(masters_round_to_weights(source, name), torch.float32)
            _put(tree, ("model",), f"module.{spell(name)}", (), main, name in gated)
            for kind in kinds:
                if kind in (Kind.weight, Kind.main):
                    continue
                value = lazy.canonical(source, Key(name, kind))
                if kind == Kind.momentum:
                    value = lazy.scaled(value, momentum_factor(source, target, Momentum.average, name))
                _put(tree, ("optimizer", "state"), f"{_STATE_PREFIX}{spell(name)}", (kind,), value, name in gated)
            group = ("optimizer", "param_to_group_meta", f"{_STATE_PREFIX}{spell(name)}")
            if name in state.steps and place is not StepPlace.parameter:
                tree.nested((*group, "step"), group_value(state.steps[name], place))
            elif name in state.steps:
                step = lazy.in_memory(torch.tensor(state.steps[name], dtype=torch.float32))
                _put(tree, ("optimizer", "state"), f"{_STATE_PREFIX}{spell(name)}", ("step",), step, name in gated)
            values = state.hyper.get(name, {})
            if values and "wd_mult" not in values:  # of a trainer that is not Megatron
                values = megatron_values(values, state.scheduler, False)
            for hyper, value in fused_values(values, place).items():
                tree.value((*group, hyper), value)
        put_run_state(tree, source, target, NAME)
        for (pipeline, tensor), values in megatron_random(state, [(0, 0)]).items():
            tree.nested(("rng_state", f"({pipeline}, {tensor})", 0), values)
        tree.value((RECORD,), record(source, momentum_of(source, target, Momentum.average), place))


def _gated(source: Source) -> set[str]:
    shapes = {key.name: info.shape for key, info in source.tensors().items() if key.kind in (Kind.weight, Kind.main)}
    return {name for name in shapes if names.FIRST.search(name) and names.is_gated(name, shapes)}


def _put(tree: DcpTree, root: tuple[str, ...], name: str, rest: tuple[str, ...], value: Lazy, gated: bool) -> None:
    """Write a tensor of a parameter; gate and up projection of a gated layer apart, 0-dim ones under both."""
    if not gated:
        tree.tensor((*root, name, *rest), value)
        return
    half = value.shape[0] // 2 if value.shape else 0
    for suffix, start in (("_w", 0), ("_v", half)):
        part = lazy.cut_rows(value, start, start + half) if value.shape else value
        tree.tensor((*root, name + suffix, *rest), part)
