"""From a checkpoint into a model and its optimizer, whatever layout either has."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.checkpoint.agreement import Team
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Momentum
from hp_muon_plugin.checkpoint.loading import Found, read
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.ranges import Chunk
from hp_muon_plugin.errors import CheckpointError
from hp_muon_plugin.layout.spec import Role
from hp_muon_plugin.megatron.contents import (
    STEP,
    buffer_parts,
    complete_state,
    counts_by_parameter,
    part_of,
    plain_values,
)
from hp_muon_plugin.megatron.held import Held, held_params
from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer

logger = logging.getLogger(__name__)

_VOCABULARY = (Role.embedding, Role.output)
_CHANGEABLE = ("lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "lr_mult", "momentum", "betas", "eps")
_NO_OPTIMIZER = "set checkpoint.load_optimizer=false to begin with fresh optimizer state"


@torch.no_grad()
def restore(
    found: Found,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    team: Team,
    *,
    load_optimizer: bool = True,
    model_options: Mapping[str, Any] | None = None,
) -> None:
    """Load weights, masters and optimizer state. All ranks call it.

    Learning rates, decays and betas stay those of this run; what differs is logged.

    Args:
        found: The checkpoint.
        chunks: Wrapped model chunks of this rank.
        optimizer: A MegatronOptimizer, ours or Megatron's.
        team: The ranks.
        load_optimizer: Whether state of the optimizer is loaded; masters are loaded in any case.
        model_options: Options of this run's model, to say which of them differs.

    Raises:
        CheckpointError: On every rank, if it is of another model or optimizer, naming the first tensor and option
            that differ; nothing is changed then.
    """
    complete_state(optimizer)
    held = held_params(chunks, optimizer)
    stored = found.manifest.parameters()
    what = f"resuming from {found.folder}"
    told = team.all(what, lambda: _check(held, stored, found, model_options or {}))
    missing = sorted({key.name for key in stored if key.kind == Kind.weight} - {n for names in told for n in names})
    if missing:
        why = f"{missing[0]} is in the checkpoint and not in this model ({len(missing)} such weights)"
        raise CheckpointError(f"{what}: {_differing(why, found, model_options or {})}")
    targets: list[Part] = []
    team.all(what, lambda: targets.extend(_targets(held, stored, load_optimizer)))
    if load_optimizer:
        team.all(what, lambda: _check_steps(held, found))
    buffers = _buffers(chunks, stored, team)
    read(found, [*targets, *buffers], team)
    for one in held:
        if one.main is not None:
            one.weight.copy_(one.main)
    if load_optimizer:
        _put_steps(held, found, optimizer)
        _convert_momentum(held, found)
        _tell_changes(held, found, team)


def _check(held: Sequence[Held], stored: Mapping[Key, Info], found: Found, options: Mapping[str, Any]) -> list[str]:
    """Compare names and shapes of this rank's weights; returns the names that it is the one to tell of."""
    for one in held:
        info = stored.get(Key(one.name, Kind.weight))
        if info is None:
            raise CheckpointError(_differing(f"{one.name} is not in the checkpoint", found, options))
        if info.shape != one.spec.shape and not _is_padding(one, info, found):
            why = f"{one.name} has shape {list(info.shape)} in the checkpoint and {list(one.spec.shape)} in this model"
            raise CheckpointError(_differing(why, found, options))
    return [one.name for one in held if one.is_written]


def _is_padding(held: Held, info: Info, found: Found) -> bool:
    """Whether shapes differ by rows of the vocabulary that no token has."""
    rows = found.manifest.state.vocab_size
    return (
        held.spec.role in _VOCABULARY
        and info.shape[1:] == held.spec.shape[1:]
        and rows is not None
        and min(info.shape[0], held.spec.shape[0]) >= rows
    )


def _differing(why: str, found: Found, options: Mapping[str, Any]) -> str:
    saved = _flat(found.manifest.state.model)
    for name, value in _flat(options).items():
        if name in saved and saved[name] != value:
            return f"{why}\n  fix: model.{name} is {saved[name]} there and {value} here; set model.{name}={saved[name]}"
    return f"{why}\n  fix: it is of another model; resume with the options that the checkpoint was trained with"


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _targets(held: Sequence[Held], stored: Mapping[Key, Info], load_optimizer: bool) -> list[Part]:
    targets = []
    for one in held:
        main = Key(one.name, Kind.main)
        key = main if main in stored else Key(one.name, Kind.weight)
        if one.main is not None:
            targets.append(_clipped(one, key, one.main, stored[key]))
        else:  # a float32 weight is its own master; a replica that updates nothing takes the weight
            is_master = one.weight.dtype is torch.float32
            key = key if is_master else Key(one.name, Kind.weight)
            targets.append(_clipped(one, key, one.weight, stored[key]))
        for kind, tensor in (one.state or {}).items() if load_optimizer else ():
            if kind == STEP:
                continue
            key = Key(one.name, kind)
            if key not in stored:
                raise CheckpointError(_no_state(one, kind, stored))
            targets.append(_clipped(one, key, tensor, stored[key]))
    return targets


def _no_state(held: Held, kind: str, stored: Mapping[Key, Info]) -> str:
    weights = (Kind.weight, Kind.main, Kind.buffer)
    others = sorted({key.kind for key in stored if key.name == held.name and key.kind not in weights})
    if others:
        why = f"it holds {', '.join(others)}, so another optimizer updated the weight"
        return f"{held.name}: the checkpoint has no {kind}; {why}\n  fix: take that optimizer, or {_NO_OPTIMIZER}"
    return f"{held.name}: the checkpoint has no {kind}, and no other optimizer state of it\n  fix: {_NO_OPTIMIZER}"


def _clipped(held: Held, key: Key, tensor: torch.Tensor, info: Info) -> Part:
    """A part of the stored tensor, without rows of padding that are not stored."""
    if info.shape == held.spec.shape:
        return part_of(held, key.kind, tensor)
    chunks = [_clip(chunk, info.shape[0]) for chunk in held.chunks if chunk.offsets[0] < info.shape[0]]
    return Part(str(key), info.shape, chunks, tensor, held.start)


def _clip(chunk: Chunk, rows: int) -> Chunk:
    return chunk._replace(sizes=(min(chunk.sizes[0], rows - chunk.offsets[0]), *chunk.sizes[1:]))


def _buffers(chunks: Sequence[torch.nn.Module], stored: Mapping[Key, Info], team: Team) -> list[Part]:
    names, wanted = {str(key): info for key, info in stored.items() if key.kind == Kind.buffer}, []
    for part, _ in buffer_parts(chunks):
        if part.name in names:
            wanted.append(part)
        elif team.is_first:
            logger.warning("%s is not in the checkpoint, and begins as in a new run", part.name)
    return wanted


def _check_steps(held: Sequence[Held], found: Found) -> None:
    for one in held:
        if one.state is not None and Kind.exp_avg in one.state and one.name not in found.manifest.state.steps:
            raise CheckpointError(
                f"{one.name}: the checkpoint does not say how many steps its moments have seen\n  fix: {_NO_OPTIMIZER}"
            )


def _put_steps(held: Sequence[Held], found: Found, optimizer: Any) -> None:
    """Every parameter gets a step count of its own: one that several share would be advanced by each of them."""
    steps = found.manifest.state.steps
    is_fused = not isinstance(optimizer, HpMuonMegatronOptimizer) and not all(
        counts_by_parameter(single.optimizer)
        for single in getattr(optimizer, "chained_optimizers", None) or [optimizer]
        if single.optimizer is not None
    )
    for one in held:
        if one.state is None or one.group is None or one.name not in steps:
            continue
        if is_fused:
            one.group[STEP] = int(steps[one.name])
        elif Kind.exp_avg in one.state:
            one.state[STEP] = torch.tensor(steps[one.name], dtype=torch.float32)


def _convert_momentum(held: Sequence[Held], found: Found) -> None:
    """From sums to the moving average that our optimizer keeps."""
    state = found.manifest.state
    if state.momentum is not Momentum.sum:
        return
    for one in held:
        if one.state is not None and Kind.momentum in one.state and one.group is not None:
            beta = float(state.hyper.get(one.name, {}).get("momentum", one.group["momentum"]))
            one.state[Kind.momentum].mul_(1 - beta)


def _tell_changes(held: Sequence[Held], found: Found, team: Team) -> None:
    """Log what this run's configuration has changed of the parameter groups."""
    if not team.is_first:
        return
    changes: dict[str, int] = {}
    for one in held:
        saved, own = found.manifest.state.hyper.get(one.name, {}), plain_values(one.group or {})
        for name in _CHANGEABLE:
            if name in saved and name in own and _plain(saved[name]) != _plain(own[name]) and name != "lr":
                text = f"{name} {saved[name]} -> {own[name]}"
                changes[text] = changes.get(text, 0) + 1
    for text, count in changes.items():
        logger.info("this run's configuration holds for parameter groups: %s (%d parameters)", text, count)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
