"""What the formats share: a source made of lazy tensors, plain values, parameter groups, the record we leave behind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Momentum, RunState, Source, Target
from hp_muon_plugin.checkpoint.files import Opened
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.group_members import momentum_decay
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.run_values import plain
from hp_muon_plugin.checkpoint.step_counts import FACT
from hp_muon_plugin.errors import CheckpointError, ConfigError, DamageError

RECORD = "hp_muon"
"""Key under which writers keep what a format has no place for. Loaders do not ask for it."""


class LazySource:
    """An opened checkpoint of tensors that know how to read themselves.

    Args:
        name: Name of the format.
        path: Its folder.
        tensors: By key.
        state: Reads the run state, once.
        opened: Its files.
    """

    def __init__(
        self, name: str, path: Path, tensors: Mapping[Key, Lazy], state: Callable[[], RunState], opened: Opened
    ) -> None:
        self.format = name
        self.path = path
        self._lazy = {key: tensors[key] for key in sorted(tensors, key=_order)}
        self._infos = {key: Info(value.shape, value.dtype) for key, value in self._lazy.items()}
        self._read_state = state
        self._state: RunState | None = None
        self._opened = opened

    def tensors(self) -> Mapping[Key, Info]:
        """As :class:`Source`."""
        return self._infos

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As :class:`Source`."""
        return self._lazy[key].rows(start, stop)

    def state(self) -> RunState:
        """As :class:`Source`."""
        if self._state is None:
            self._state = self._read_state()
        return self._state

    def close(self) -> None:
        """Close files."""
        self._opened.close()

    def compare_rest(self) -> None:
        """As :meth:`Files.compare_rest`."""
        self._opened.compare_rest()


def _order(key: Key) -> tuple[Any, ...]:
    parts = tuple((int(part), "") if part.isdigit() else (-1, part) for part in key.name.split("."))
    return parts, key.kind


def groups_of(hyper: Mapping[str, Mapping[str, Any]], order: Iterable[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Parameters of equal values put together, in the order in which groups first appear.

    Args:
        hyper: Values of each parameter.
        order: Names of all parameters.

    Returns:
        Values and names of each group.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name in order:
        values = dict(hyper.get(name, {}))
        groups.setdefault(repr(sorted(values.items())), (values, []))[1].append(name)
    return list(groups.values())


def kinds_by_name(source: Source) -> dict[str, list[str]]:
    """Kinds of tensors of each name."""
    found: dict[str, list[str]] = {}
    for key in source.tensors():
        found.setdefault(key.name, []).append(str(key.kind))
    return found


def full_precision(source: Source, name: str) -> Lazy:
    """The master of a parameter, or its weight where that is the master."""
    key = Key(name, Kind.main)
    if key not in source.tensors():
        return lazy.canonical(source, Key(name, Kind.weight))
    return lazy.canonical(source, key)


def stored_weight(source: Source, name: str, dtype: torch.dtype | None = None) -> Lazy:
    """The weight of a parameter; rounded from its master where only that is stored.

    Args:
        source: The checkpoint.
        name: Which parameter.
        dtype: Dtype wanted; None keeps it.
    """
    key = Key(name, Kind.weight if Key(name, Kind.weight) in source.tensors() else Kind.main)
    found = lazy.canonical(source, key)
    return lazy.cast(found, dtype or found.dtype)


def masters_round_to_weights(source: Source, name: str) -> Lazy:
    """The master of a parameter; reading it fails where it does not round to the stored weight.

    For formats that keep masters only: the weight must come back from them.
    """
    main_key, weight_key = Key(name, Kind.main), Key(name, Kind.weight)
    infos = source.tensors()
    main = full_precision(source, name)
    if main_key not in infos or weight_key not in infos:
        return main
    weight = lazy.canonical(source, weight_key)
    return agreeing(main, weight, f"{source.path}: {name}")


def agreeing(main: Lazy, weight: Lazy, where: str) -> Lazy:
    """A master whose reading fails where it does not round to the weight.

    Args:
        main: The master.
        weight: The weight.
        where: File and tensor, for the message.
    """

    def read(start: int, stop: int) -> torch.Tensor:
        found = main.read(start, stop)
        rounded, stored = found.to(weight.dtype), weight.read(start, stop)
        if torch.equal(rounded, stored):
            return found
        same = (rounded == stored) | (rounded.isnan() & stored.isnan())
        if not bool(same.all()):
            wrong = int((~same).sum())
            raise DamageError(
                f"{where}: {wrong} of {same.numel()} elements of the float32 master do not round to the stored weight; "
                "the checkpoint was written wrongly, or is damaged\n  fix: use another checkpoint of the run"
            )
        return found

    return Lazy(main.shape, main.dtype, read)


def momentum_factor(source: Source, target: Target, wanted: Momentum | None, name: str) -> float:
    """What a momentum buffer is to be multiplied by for its reader.

    Args:
        source: The checkpoint.
        target: Its option ``momentum`` overrules ``wanted``, ``momentum_is`` what the source says.
        wanted: Convention of the format's reader, or None if it has none.
        name: Which parameter.

    Raises:
        ConfigError: If the decay is not known.
    """
    state = source.state()
    has = _convention(target, "momentum_is") or state.momentum
    want = _convention(target, "momentum") or wanted
    if has is None or want is None or has is want:
        return 1.0
    decay = momentum_decay(state.hyper.get(name, {}))
    if not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ConfigError(
            "--option momentum",
            want,
            f"the momentum of {name} is kept as {has}, and its decay is not in the checkpoint",
            f"--option momentum_is={want}, and scale by hand",
        )
    return 1 - float(decay) if want is Momentum.average else 1 / (1 - float(decay))


def check_momentum(source: Source, target: Target, wanted: Momentum | None) -> None:
    """Check that every momentum buffer can be written, as :func:`momentum_factor`.

    Args:
        source: The checkpoint.
        target: How it is written.
        wanted: Convention of the format's reader, or None if it has none.

    Raises:
        ConfigError: If one cannot.
    """
    for key in source.tensors():
        if key.kind == Kind.momentum:
            momentum_factor(source, target, wanted, key.name)


def momentum_of(source: Source, target: Target, wanted: Momentum | None) -> Momentum | None:
    """Convention of the momentum buffers as they are written."""
    has = _convention(target, "momentum_is") or source.state().momentum
    return has and (_convention(target, "momentum") or wanted or has)


def _convention(target: Target, option: str) -> Momentum | None:
    value = target.options.get(option)
    return None if value is None else Momentum(value)


def record(source: Source, momentum: Momentum | None, step_place: str | None = None) -> dict[str, Any]:
    """What we leave in a checkpoint so that a later conversion finds all again: the run state and dtypes of weights.

    Args:
        source: What is written.
        momentum: Convention of the momentum buffers as written.
        step_place: Where step counts are written, if not where the source had them.
    """
    state = asdict(source.state())
    state["momentum"] = None if momentum is None else str(momentum)
    if step_place is not None:
        state["model"][FACT] = str(step_place)
    weights = {
        key.name: str(info.dtype).removeprefix("torch.")
        for key, info in source.tensors().items()
        if key.kind == Kind.weight and Key(key.name, Kind.main) in source.tensors()
    }
    return {"version": 1, "state": plain(state), "weights": weights}


def recorded_state(found: Any, file: str) -> RunState:
    """The run state of a :func:`record`.

    Args:
        found: The record, or None.
        file: Where it stood, for messages.

    Raises:
        CheckpointError: If it is of a later version than ours.
    """
    if not isinstance(found, Mapping):
        return RunState()
    if found.get("version") != 1:
        raise CheckpointError(
            f"{file}: its {RECORD} record has version {found.get('version')}, this release reads 1\n"
            "  fix: use a later release of hp_muon_plugin"
        )
    known = {field.name for field in fields(RunState)}
    state = RunState(**{key: value for key, value in found["state"].items() if key in known})
    state.momentum = None if state.momentum is None else Momentum(state.momentum)
    return state


def recorded_dtypes(found: Any) -> dict[str, torch.dtype]:
    """Dtypes of weights whose masters alone are stored, by name."""
    weights = found.get("weights", {}) if isinstance(found, Mapping) else {}
    return {name: getattr(torch, dtype) for name, dtype in weights.items() if hasattr(torch, dtype)}


def model_facts(shapes: Sequence[str]) -> dict[str, Any]:
    """What the names of a model's tensors tell: layers, experts, whether the output layer is tied."""
    layers = [index for name in shapes if (index := names.layer_index(name)) is not None]
    experts = [index for name in shapes if (index := names.expert_index(name)) is not None]
    facts: dict[str, Any] = {}
    if layers:
        facts["num_layers"] = max(layers) + 1
    if experts:
        facts["num_experts"] = max(experts) + 1
    if names.EMBEDDING in shapes:
        facts["tied"] = names.OUTPUT not in shapes
    return facts


def take_args(state: RunState, args: Any) -> None:
    """Fill in what Megatron's arguments tell.

    Args:
        state: Filled.
        args: A namespace or dict.
    """
    state.args = plain(args) if args is not None else {}
    if state.vocab_size is None and isinstance(state.args.get("vocab_size"), int):
        state.vocab_size = state.args["vocab_size"]
    if state.consumed_samples is None and isinstance(state.args.get("consumed_train_samples"), int):
        state.consumed_samples = state.args["consumed_train_samples"]


def model_dtype(args: Mapping[str, Any]) -> torch.dtype | None:
    """Dtype of the weights that Megatron's arguments name."""
    if args.get("bf16"):
        return torch.bfloat16
    if args.get("fp16"):
        return torch.float16
    found = getattr(torch, str(args.get("params_dtype")).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
