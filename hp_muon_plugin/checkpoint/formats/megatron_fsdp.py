"""Reader of ``fsdp_dtensor``, the checkpoints of Megatron-FSDP."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, RunState
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    LazySource,
    model_dtype,
    recorded_dtypes,
)
from hp_muon_plugin.checkpoint.formats.megatron_run import run_state
from hp_muon_plugin.checkpoint.formats.random_states import rank_name
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import note_place, take_group_steps
from hp_muon_plugin.errors import DamageError

NAME = "fsdp_dtensor"
MODEL = "model."
STATE = "optimizer.state."
GROUP = "optimizer.param_to_group_meta."
_HALF = re.compile(r"^(.*linear_fc1\.(?:weight|bias)\d*)_([wv])$")


def is_fsdp_dtensor(folder: DcpFolder) -> bool:
    """Whether an opened DCP folder has the keys of this format."""
    return any(key.startswith("model.module.") for key in folder.tensors)


def open_fsdp_dtensor(path: Path, folder: DcpFolder | None = None) -> LazySource:
    """Open a checkpoint.

    Args:
        path: Its ``iter_*`` folder.
        folder: The same, if it is open already.

    Raises:
        CheckpointError: If metadata is missing or damaged, or a gated weight has one half only.
    """
    folder = folder or DcpFolder(path)
    found = folder.object(RECORD) if RECORD in folder.objects else None
    args = plain(folder.object("args")) if "args" in folder.objects else {}
    dtypes = None if found is None else recorded_dtypes(found)
    tensors = dict(_tensors(folder, model_dtype(args), dtypes))
    return LazySource(NAME, path, tensors, lambda: _state(folder, args, found, tensors), folder)


def _tensors(
    folder: DcpFolder, dtype: torch.dtype | None, dtypes: dict[str, torch.dtype] | None
) -> Iterator[tuple[Key, Lazy]]:
    for name, main in _whole_names(folder, MODEL):
        for single, tensor in names.single_experts(name, main):
            if names.is_buffer(single):
                yield Key(single, Kind.buffer), tensor
                continue
            low = dtype if dtypes is None else dtypes.get(single)
            if low is None or low == tensor.dtype:
                yield Key(single, Kind.weight), tensor
            else:
                yield Key(single, Kind.main), tensor
                yield Key(single, Kind.weight), lazy.cast(tensor, low)
    for kind in sorted({key.rsplit(".", 1)[1] for key in folder.tensors if key.startswith(STATE)} - {"step"}):
        for name, tensor in _whole_names(folder, STATE, f".{kind}"):
            for single, part in names.single_experts(name, tensor):
                yield Key(single, kind), part


def _whole_names(folder: DcpFolder, prefix: str, suffix: str = "") -> Iterator[tuple[str, Lazy]]:
    """Tensors under a prefix, halves of gated first layers put together again."""
    halves: dict[str, dict[str, Lazy]] = {}
    for key in folder.tensors:
        if not key.startswith(prefix) or not key.endswith(suffix):
            continue
        name = names.bare(key.removeprefix(prefix).removesuffix(suffix))
        if half := _HALF.match(name):
            halves.setdefault(half[1], {})[half[2]] = lazy.in_dcp(folder, key)
        else:
            yield name, lazy.in_dcp(folder, key)
    for name, pair in halves.items():
        if set(pair) != {"w", "v"}:
            there = next(iter(pair))
            raise DamageError(
                f"{folder.path}: {name}_{there} is there, but its other half is not\n"
                "  fix: copy the checkpoint again from where it was saved"
            )
        yield name, lazy.rows_of([pair["w"], pair["v"]])


def _state(folder: DcpFolder, args: dict[str, Any], found: Any, tensors: dict[Key, Lazy]) -> RunState:
    state = run_state(folder, args, found, tensors)
    state.steps = {}
    for key in folder.tensors:
        if key.startswith(STATE) and key.endswith(".step"):
            _take_step(state, names.bare(key.removeprefix(STATE).removesuffix(".step")), folder.read(key))
    for key in [*folder.objects, *folder.tensors]:
        if key.startswith(GROUP):
            whole, hyper = key.removeprefix(GROUP).rsplit(".", 1)
            value = folder.object(key) if key in folder.objects else folder.read(key)
            for single in _canonical_names(names.bare(whole)):
                state.hyper.setdefault(single, {})[hyper] = plain(value)
    note_place(state, take_group_steps(state, {key.name for key in tensors if key.kind == Kind.exp_avg}))
    state.random = {**state.random, **random_state(folder)}
    return state


def _take_step(state: RunState, name: str, step: torch.Tensor) -> None:
    half = _HALF.match(name)
    for single in _canonical_names(half[1] if half else name):
        state.steps[single] = float(step)


def _canonical_names(name: str) -> list[str]:
    scalar = lazy.in_memory(torch.zeros(()))
    return [single for single, _ in names.single_experts(name, scalar)]


def random_state(folder: DcpFolder) -> dict[str, Any]:
    """Random state of each rank that saved one, by the rank's name in the checkpoint."""
    planner = folder.planner_data
    found: dict[str, Any] = {}
    for key in [*folder.objects, *folder.tensors]:
        path = planner.get(key)
        if not key.startswith("rng_state.") or not path:
            continue
        value = folder.object(key) if key in folder.objects else folder.read(key)
        pipeline, tensor = (int(part) for part in str(path[1]).strip("()").split(","))
        inner = found.setdefault(rank_name(pipeline, tensor, data=path[2]), {})
        for part in path[3:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return {name: {"states": plain(values)} for name, values in found.items()}
