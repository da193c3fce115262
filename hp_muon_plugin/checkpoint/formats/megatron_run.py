"""The run state as Megatron keeps it beside tensors in DCP folders: one object for each value."""

import argparse
from collections.abc import Iterable
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, RunState, Source, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats.base import model_facts, recorded_state, take_args
from hp_muon_plugin.checkpoint.formats.dcp_tree import DcpTree
from hp_muon_plugin.checkpoint.formats.model_args import model_args
from hp_muon_plugin.checkpoint.formats.spelling import facts_of
from hp_muon_plugin.checkpoint.run_values import namespace, plain

_FLOPS = "num_floating_point_operations_so_far"
_SCHEDULER = "opt_param_scheduler"


def megatron_args(args: dict[str, Any], ckpt_format: str, **sizes: int) -> argparse.Namespace:
    """Megatron's arguments as a checkpoint holds them.

    Args:
        args: Of the source; may be empty.
        ckpt_format: Format that they name.
        sizes: Parallel sizes to set.
    """
    return namespace({**args, "ckpt_format": ckpt_format, **sizes})


def put_run_state(tree: DcpTree, source: Source, target: Target, ckpt_format: str) -> None:
    """Write arguments, iteration, operations and scheduler.

    Args:
        tree: What is written.
        source: What is written.
        target: Its options.
        ckpt_format: Format that the arguments name.
    """
    state = source.state()
    tree.value(("args",), megatron_args({**state.args, **model_args(source, target)}, ckpt_format))
    tree.value(("iteration",), state.iteration)
    tree.value(("checkpoint_version",), 3.0)
    tree.value((_FLOPS,), state.flops or 0)
    tree.nested((_SCHEDULER,), state.scheduler)


def run_state(folder: DcpFolder, args: dict[str, Any], record: Any, keys: Iterable[Key]) -> RunState:
    """Read what :func:`put_run_state` writes, what a conversion of ours left, and what names of tensors tell.

    Args:
        folder: The checkpoint.
        args: Megatron's arguments.
        record: What a conversion left, or None.
        keys: Canonical tensors.

    Returns:
        The state, without steps, groups and random states of this checkpoint.
    """
    state = recorded_state(record, str(folder.path))
    take_args(state, args)
    if "iteration" in folder.objects:
        state.iteration = int(folder.object("iteration"))
    if _FLOPS in folder.objects:
        state.flops = folder.object(_FLOPS) or state.flops
    prefix = f"{_SCHEDULER}."
    state.scheduler = {
        key.removeprefix(prefix): plain(folder.object(key)) for key in folder.objects if key.startswith(prefix)
    }
    found = list(keys)
    if record is None and any(key.kind == Kind.momentum for key in found):
        state.momentum = Momentum.average
    state.model = {**state.model, **model_facts([key.name for key in found]), **facts_of(folder.tensors)}
    return state
