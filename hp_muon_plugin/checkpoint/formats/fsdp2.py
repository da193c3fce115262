"""Reader of torch FSDP2 checkpoints: a model and its optimizer, saved by name with torch.distributed.checkpoint."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Momentum, RunState
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.files import Opened
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import (
    RECORD,
    LazySource,
    model_facts,
    recorded_dtypes,
    recorded_state,
)
from hp_muon_plugin.checkpoint.formats.spelling import prediction_facts
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import note_place, take_group_steps
from hp_muon_plugin.errors import CheckpointError

NAME = "fsdp2"
_OPTIMIZER = re.compile(r"^(?P<root>(?:\w+\.)*?(?:optim|optimizer|opt)\.|)(?P<part>state|param_groups)\.(?P<rest>.+)$")
_MODEL = re.compile(r"^(?P<root>(?:\w+\.)*?model\.)(?P<rest>.+)$")
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
_ITERATIONS = ("iteration", "global_step", "step", "train_state.step")
_SCHEDULERS = ("lr_scheduler.", "scheduler.", "opt_param_scheduler.")


@dataclass(frozen=True, slots=True)
class Keyed:
    """A folder of tensors and byte objects under flat keys.

    Attributes:
        path: The folder.
        tensors: By key.
        objects: Keys of byte objects.
        object: Reads one.
        opened: Its files.
    """

    path: Path
    tensors: dict[str, Lazy]
    objects: list[str]
    object: Callable[[str], Any]
    opened: Opened


@dataclass(slots=True)
class _Keys:
    """Keys of a folder by what they are."""

    model: dict[str, str] = field(default_factory=dict)
    state: dict[tuple[str, str], str] = field(default_factory=dict)
    group: dict[tuple[str, str], str] = field(default_factory=dict)


def open_fsdp2(path: Path, folder: DcpFolder | None = None) -> LazySource:
    """Open a checkpoint. ``model.<name>`` and ``optim.state.<name>.<kind>`` may lie below further dicts.

    Args:
        path: Folder of the ``.metadata``.
        folder: The same, if it is open already.

    Raises:
        CheckpointError: If metadata is missing or damaged, or no key is a model's.
    """
    folder = folder or DcpFolder(path)
    tensors = {key: lazy.in_dcp(folder, key) for key in folder.tensors}
    return by_name(NAME, Keyed(path, tensors, list(folder.objects), folder.object, folder))


def by_name(format_name: str, folder: Keyed) -> LazySource:
    """A source of a folder in which a model and its optimizer are saved by name.

    Args:
        format_name: Name of the format.
        folder: The folder.

    Raises:
        CheckpointError: If no key is a model's.
    """
    keys = _sorted_out(folder)
    if not keys.model:
        raise CheckpointError(
            f"{folder.path} has no key that begins with model. or contains .model.; keys are such as "
            f"{', '.join(list(folder.tensors)[:3])}\n  fix: save as dict(model=..., optim=...)"
        )
    found = folder.object(RECORD) if RECORD in folder.objects else None
    tensors = dict(_tensors(folder, keys, recorded_dtypes(found)))
    _drop_alias(tensors, {name for name, _ in keys.state})
    return LazySource(format_name, folder.path, tensors, lambda: _state(folder, keys, found, tensors), folder.opened)


def clean(name: str) -> str:
    """A name without what wrappers add to it."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def _sorted_out(folder: Keyed) -> _Keys:
    keys = _Keys()
    for key in [*folder.tensors, *folder.objects]:
        if key.startswith((RECORD, *_SCHEDULERS)):
            continue
        if found := _OPTIMIZER.match(key):
            name, kind = found["rest"].rsplit(".", 1) if "." in found["rest"] else (found["rest"], "")
            (keys.state if found["part"] == "state" else keys.group)[clean(name), kind] = key
        elif found := _MODEL.match(key):
            keys.model[clean(found["rest"])] = key
    return keys


def _tensors(folder: Keyed, keys: _Keys, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[Key, Lazy]]:
    trained = {name for name, _ in keys.state}
    for name, key in keys.model.items():
        if key not in folder.tensors or name.endswith(names.EXTRA_STATE):
            continue
        for single, tensor in names.single_experts(name, folder.tensors[key]):
            low = dtypes.get(single)
            if names.is_buffer(single):
                yield Key(single, Kind.buffer), tensor
            elif low is None or low == tensor.dtype:
                yield Key(single, Kind.weight), tensor
            else:
                yield Key(single, Kind.main), tensor
                yield Key(single, Kind.weight), lazy.cast(tensor, low)
    for (name, kind), key in keys.state.items():
        if key not in folder.tensors or not folder.tensors[key].shape or kind == "step":
            continue
        if name not in keys.model:
            raise CheckpointError(
                f"{folder.path}: optimizer state of {name}, which the model does not have; it has such as "
                f"{', '.join(list(keys.model)[:3])} and state of {', '.join(sorted(trained)[:3])}"
            )
        for single, tensor in names.single_experts(name, folder.tensors[key]):
            yield Key(single, kind), tensor


def _drop_alias(tensors: dict[Key, Lazy], trained: set[str]) -> None:
    """Leave out an output layer that is the embedding: torch saves a tied weight under both names, its state once."""
    embedding, output = (tensors.get(Key(name, Kind.weight)) for name in (names.EMBEDDING, names.OUTPUT))
    if embedding is None or output is None or not trained or names.OUTPUT in trained:
        return
    if embedding.shape == output.shape and torch.equal(embedding.rows(0, 8), output.rows(0, 8)):
        del tensors[Key(names.OUTPUT, Kind.weight)]


def _state(folder: Keyed, keys: _Keys, found: Any, tensors: dict[Key, Lazy]) -> RunState:
    state = recorded_state(found, str(folder.path))
    for key in _ITERATIONS:
        if key in folder.objects or key in folder.tensors:
            state.iteration = int(_small(folder, key))
            break
    for prefix in _SCHEDULERS:
        values = {
            key.removeprefix(prefix): plain(folder.object(key)) for key in folder.objects if key.startswith(prefix)
        }
        state.scheduler = values or state.scheduler
    for (name, kind), key in keys.state.items():
        if kind == "step":
            for single in _singles(folder, keys, name):
                state.steps[single] = float(_small(folder, key))
    for name, values in _hyper(folder, keys):
        for single in _singles(folder, keys, name):
            state.hyper[single] = {**state.hyper.get(single, {}), **values}
    place = take_group_steps(state, {key.name for key in tensors if key.kind == Kind.exp_avg})
    note_place(state, place)
    _take_momentum(state, tensors)
    state.model = {**state.model, **model_facts([key.name for key in tensors]), **prediction_facts(keys.model)}
    if any(".experts.linear" in name for name in keys.model):
        state.model["stacked_experts"] = True
    if any(not name.isdigit() for name, _ in keys.group):
        state.model["flat_optimizer"] = True
    return state


def _take_momentum(state: RunState, tensors: dict[Key, Lazy]) -> None:
    """torch.optim.Muon keeps an average. Of other optimizers the groups do not say it."""
    named = [state.hyper.get(key.name, {}) for key in tensors if key.kind == Kind.momentum]
    if named and state.momentum is None and all("ns_coefficients" in values for values in named):
        state.momentum = Momentum.average


def _hyper(folder: Keyed, keys: _Keys) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values of each parameter, from groups with lists of names or from one entry per parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for (name, hyper), key in keys.group.items():
        groups.setdefault(name, {})[hyper] = plain(_small(folder, key))
    for name, values in groups.items():
        params = values.pop("params", None)
        if not name.isdigit():
            yield name, values
            continue
        for param in params or []:
            yield clean(str(param)), dict(values)


def _singles(folder: Keyed, keys: _Keys, name: str) -> list[str]:
    key = keys.model.get(name)
    if key is None or key not in folder.tensors:
        return [name]
    return [single for single, _ in names.single_experts(name, folder.tensors[key])]


def _small(folder: Keyed, key: str) -> Any:
    return folder.tensors[key].rows() if key in folder.tensors else folder.object(key)
