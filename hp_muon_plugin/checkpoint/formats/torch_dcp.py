"""Reader of Megatron's ``torch_dcp``: torch FSDP2 with Megatron's own optimizers, whose states go by numbers."""

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
    agreeing,
)
from hp_muon_plugin.checkpoint.formats.group_members import Param
from hp_muon_plugin.checkpoint.formats.integer_state import Named, Optimizer, named
from hp_muon_plugin.checkpoint.formats.megatron_run import run_state
from hp_muon_plugin.checkpoint.formats.random_states import rank_name
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import note_place
from hp_muon_plugin.errors import CheckpointError, DamageError

NAME = "torch_dcp"
_STATE = re.compile(r"^optimizer\.(?:(\d+)\.)?(?:optimizer\.)?state\.(\d+)\.(\w+)$")
_GROUP = re.compile(r"^optimizer\.(?:(\d+)\.)?(?:optimizer\.)?param_groups\.(\d+)\.(\w+)$")
_MASTER = re.compile(r"^optimizer\.(?:(\d+)\.)?fp32_from_fp16_params\.(\d+)\.(\d+)$")


def open_torch_dcp(path: Path, folder: DcpFolder | None = None) -> LazySource:
    """Open a checkpoint.

    Args:
        path: Its ``iter_*`` folder.
        folder: The same, if it is open already.

    Raises:
        CheckpointError: If metadata is missing or damaged, or numbers do not fit the model's parameters.
    """
    folder = folder or DcpFolder(path)
    args = plain(folder.object("args")) if "args" in folder.objects else {}
    model = {
        names.bare(key.removeprefix("model.")): lazy.in_dcp(folder, key)
        for key in folder.tensors
        if key.startswith("model.")
    }
    if not model:
        raise CheckpointError(f"{path} has no key that begins with model.")
    weights = {name: value for name, value in model.items() if not names.is_buffer(name)}
    params = [Param(name, weights[name].shape, False) for name in sorted(weights, key=registration_order)]
    dtypes = {name: value.dtype for name, value in weights.items()}
    optimizers = list(_optimizers(folder).values())
    record = folder.object(RECORD) if RECORD in folder.objects else None
    known = named(optimizers, params, dtypes, args, str(path), record) if optimizers else Named()
    tensors = dict(_tensors(path, model, weights, known))
    return LazySource(NAME, path, tensors, lambda: _state(folder, args, record, known, tensors), folder)


def _tensors(path: Path, model: dict[str, Lazy], weights: dict[str, Lazy], known: Named) -> Iterator[tuple[Key, Lazy]]:
    for name, value in model.items():
        kind = Kind.buffer if names.is_buffer(name) else Kind.weight
        for single, part in names.single_experts(name, value):
            yield Key(single, kind), part
    for (name, kind_name), value in known.tensors.items():
        checked = agreeing(value, weights[name], f"{path}: {name}") if kind_name == Kind.main else value
        for single, part in names.single_experts(name, checked):
            yield Key(single, kind_name), part


def _optimizers(folder: DcpFolder) -> dict[int, Optimizer]:
    found: dict[int, Optimizer] = {}

    def optimizer(number: str | None) -> Optimizer:
        return found.setdefault(int(number or 0), Optimizer([], [], {}))

    groups: dict[tuple[int, int], dict[str, Any]] = {}
    masters: dict[tuple[int, int], dict[int, Lazy]] = {}
    for key in [*folder.tensors, *folder.objects]:
        if match := _STATE.match(key):
            value = lazy.in_dcp(folder, key) if key in folder.tensors else folder.object(key)
            optimizer(match[1]).state.setdefault(int(match[2]), {})[match[3]] = value
        elif match := _GROUP.match(key):
            optimizer(match[1])
            value = folder.object(key) if key in folder.objects else folder.read(key)
            value = float(value) if isinstance(value, torch.Tensor) and match[3] != "step" else value
            groups.setdefault((int(match[1] or 0), int(match[2])), {})[match[3]] = plain(value)
        elif match := _MASTER.match(key):
            optimizer(match[1]).half = True
            place = int(match[1] or 0), int(match[2])
            masters.setdefault(place, {})[int(match[3])] = lazy.in_dcp(folder, key)
    for (number, _), values in sorted(groups.items()):
        ids = values.pop("params", None)
        if ids is None:
            raise DamageError(f"{folder.path}: a parameter group of optimizer {number} has no params")
        found[number].ids.append([int(item) for item in ids])
        found[number].counts.append(len(ids))
        found[number].groups.append(values)
    for number, made in found.items():
        if made.half:
            made.masters = [
                [masters.get((number, index), {})[place] for place in sorted(masters.get((number, index), {}))]
                for index in range(len(made.groups))
            ]
    return dict(sorted(found.items()))


def _state(folder: DcpFolder, args: dict[str, Any], record: Any, known: Named, tensors: dict[Key, Lazy]) -> RunState:
    state = run_state(folder, args, record, tensors)
    for name, step in known.steps.items():
        for single, _ in names.single_experts(name, lazy.in_dcp(folder, _model_key(folder, name))):
            state.steps[single] = step
    for name, values in known.hyper.items():
        for single, _ in names.single_experts(name, lazy.in_dcp(folder, _model_key(folder, name))):
            state.hyper[single] = values
    state.random = {**state.random, **_random(folder)}
    note_place(state, known.step_place)
    return state


def _model_key(folder: DcpFolder, name: str) -> str:
    return next(key for key in (f"model.{name}", f"model.module.{name}") if key in folder.tensors)


def _random(folder: DcpFolder) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in [*folder.objects, *folder.tensors]:
        path = folder.planner_data.get(key)
        if not key.startswith("rng_state.") or not path:
            continue
        inner = found.setdefault(rank_name(0, 0, data=int(path[1])), {})
        for part in path[2:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = folder.object(key) if key in folder.objects else folder.read(key)
    return {name: {"states": plain(values)} for name, values in found.items()}
