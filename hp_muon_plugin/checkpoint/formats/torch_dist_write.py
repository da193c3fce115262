"""Writer of Megatron's ``torch_dist`` checkpoints, in the form that megatron-core 0.14 to 0.19 load."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Loss, Momentum, Source, Target
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter, waiting_bytes
from hp_muon_plugin.checkpoint.folders import write_durably
from hp_muon_plugin.checkpoint.formats.group_members import momentum_decay
from hp_muon_plugin.checkpoint.formats.legacy_plan import padded_rows
from hp_muon_plugin.checkpoint.formats.random_states import by_place
from hp_muon_plugin.checkpoint.formats.stages import INSIDE, expert_tensors_of
from hp_muon_plugin.checkpoint.formats.torch_dist_buffers_write import buffers_plan, write_buffers
from hp_muon_plugin.checkpoint.formats.torch_dist_common import (
    common_state,
    extra_state_keys,
    group_lists,
    members,
    optimizer_state,
    random_objects,
    uneven_steps,
)
from hp_muon_plugin.checkpoint.formats.torch_dist_style import BUCKETS, sharding_of, style_of_target
from hp_muon_plugin.checkpoint.hashing import piece_bytes
from hp_muon_plugin.checkpoint.megatron_names import Style, is_expert, moe_layers_of, place
from hp_muon_plugin.checkpoint.step_counts import wanted_place, with_step
from hp_muon_plugin.errors import ConfigError

_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_FIXED = (Kind.weight, Kind.main, Kind.buffer)


class TorchDistWriter:
    """Writes what Megatron loads with ``--ckpt-format torch_dist``."""

    format = "torch_dist"

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        if sharding_of(source, target) == BUCKETS:
            buffers_plan(source, target)
        _check_experts(source, target)
        style_of_target(source, target)
        wanted_place(source, target)
        infos, state = source.tensors(), source.state()
        lost: list[Loss] = []
        if uneven_steps(source):
            text = "step counts: parameters have done different numbers of steps, each group keeps its largest"
            lost.append(Loss(text, steps=state.steps))
        if _unscaled(source):
            text = (
                f"momentum of {_unscaled(source)} parameters: Megatron's Muon averages, the buffers here are sums, and "
                "the decay to scale them by is not in the source: they stay sums"
            )
            lost.append(Loss(text))
        without = {key.name for key in infos if key.kind not in _FIXED and not _has_master(infos, key.name)}
        if without:
            text = f"masters of {len(without)} parameters: none in the source, the rounded weights will serve"
            lost.append(Loss(text))
        _, missing = random_objects(state, target)
        if missing:
            ranks = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            text = f"random state of (pipeline, tensor) ranks {ranks}: none in the source; load with --no-load-rng"
            lost.append(Loss(text))
        is_by_data_rank = target.megatron is not None and (0, 14) <= target.megatron < (0, 19) and target.ep > 1
        if is_by_data_rank and not missing and not any(".dp" in name for name in by_place(state)):
            text = "random state of data ranks, which this version asks for with EP > 1: load with --no-load-rng"
            lost.append(Loss(text))
        return lost

    def where(self, source: Source, target: Target) -> dict[Key, str]:
        """Key in the files of each canonical tensor, for the plan."""
        sharding, infos = sharding_of(source, target), source.tensors()
        style, moe = style_of_target(source, target), moe_layers_of(key.name for key in infos)
        prefixes = _prefixes(source, target, sharding)
        found = {}
        for key in infos:
            spot = place(key.name, style, moe)
            found[key] = f"{_prefix(key, prefixes, infos, sharding)}{spot.key}{list(spot.index) or ''}"
        return found

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        sharding = sharding_of(source, target)
        expert_parallel = target.ep > 1
        chain = members(source, expert_parallel)
        is_converted = not _unscaled(source)
        lists = group_lists(chain, source, expert_parallel)
        for group in (group for items in lists for group in items if "momentum_convention" in group):
            group["momentum_convention"] = "moving_average" if is_converted else "sum"
        place, is_float32 = wanted_place(source, target), _is_float32(source.tensors())
        with DcpWriter(folder, target.shard_bytes, None, waiting_bytes(budget), target.jobs) as writer:
            self._write_tensors(source, writer, target, sharding, count, piece_bytes(budget))
            self._write_objects(source, writer, target)
            if sharding == BUCKETS and chain:
                told = [[with_step(group, place) for group in items] for items in lists]
                write_buffers(source, writer, target, chain, told, count, piece_bytes(budget))
            writer.close()
        optimizer = optimizer_state(chain, lists, sharding, is_float32, place) if chain else {}
        momentum = Momentum.average if source.state().momentum and is_converted else source.state().momentum
        inside = {INSIDE: expert_tensors_of(source, target)} if sharding == BUCKETS else {}
        common = common_state(source, target, optimizer, sharding, momentum, inside)
        torch.save(common, folder / "common.pt")
        write_durably(folder / "metadata.json", json.dumps(_METADATA))

    def _write_tensors(
        self, source: Source, writer: DcpWriter, target: Target, sharding: str, count: Callable[[int], None], piece: int
    ) -> None:
        infos = source.tensors()
        weights = [key.name for key in infos if key.kind == Kind.weight]
        style, moe = style_of_target(source, target), moe_layers_of(weights)
        prefixes = _prefixes(source, target, sharding)
        stored = [(_prefix(key, prefixes, infos, sharding), key) for key in _wanted(infos, sharding)]
        padding = {f"{prefix}{key.name}": _padding(source, target, key.name) for prefix, key in stored}
        for name, shape, dtype in _stacks(stored, infos, style, moe):
            more = padding.get(name, 0)
            writer.declare(name, (shape[0] + more, *shape[1:]) if more else shape, dtype)
        for prefix, key in stored:
            where = place(key.name, style, moe)
            read_key, dtype = key, infos[key].dtype if key in infos else torch.float32
            if key not in infos:
                read_key = Key(key.name, Kind.weight)
            factor = momentum_factor(source, key.name) if key.kind == Kind.momentum else 1.0
            value = lazy.scaled(lazy.cast(lazy.canonical(source, read_key), dtype), factor)
            writer.copy(f"{prefix}{where.key}", value, count, piece, where.index)
            missing = _padding(source, target, key.name)
            if missing:
                start, *rest = infos[read_key].shape
                zeros = torch.zeros((missing, *rest), dtype=dtype)
                writer.write(f"{prefix}{where.key}", zeros, (start, *(0 for _ in rest)))

    def _write_objects(self, source: Source, writer: DcpWriter, target: Target) -> None:
        weights = [key.name for key in source.tensors() if key.kind == Kind.weight]
        state = source.state()
        style = style_of_target(source, target)
        for key in extra_state_keys(
            weights, style, moe_layers_of(weights), state.model.get("modules_with_extra_state")
        ):
            writer.add_object(key, [None])
        for key, value in random_objects(state, target)[0].items():
            writer.add_object(key, value)


def _padding(source: Source, target: Target, name: str) -> int:
    """Rows that an embedding without padding, as of Hugging Face, lacks of what Megatron will want."""
    info = source.tensors().get(Key(name, Kind.weight))
    if info is None or name not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return 0
    state = source.state()
    rows = padded_rows(state.args, state.vocab_size, target)
    if rows is None or (info.shape[0] != state.vocab_size and target.sharding != BUCKETS):
        return 0
    return rows - info.shape[0]


def _check_experts(source: Source, target: Target) -> None:
    experts = {key.name.split("local_experts.")[1].split(".")[0] for key in source.tensors() if is_expert(key.name)}
    if experts and len(experts) % target.ep:
        raise ConfigError(
            "--ep", target.ep, f"{len(experts)} experts cannot be shared out evenly", "a divisor of the experts"
        )


def momentum_factor(source: Source, name: str) -> float:
    """What a momentum buffer is multiplied by: Megatron's Muon keeps averages.

    Args:
        source: The checkpoint.
        name: Of the parameter.
    """
    state = source.state()
    decay = momentum_decay(state.hyper.get(name, {}))
    if state.momentum is not Momentum.sum or not isinstance(decay, int | float) or not 0 <= decay < 1:
        return 1.0
    return 1.0 - float(decay)


def _unscaled(source: Source) -> int:
    if source.state().momentum is not Momentum.sum:
        return 0
    return sum(key.kind == Kind.momentum and momentum_factor(source, key.name) == 1.0 for key in source.tensors())


def _wanted(infos: Mapping[Key, Info], sharding: str) -> list[Key]:
    """Tensors to write under their names: all, and the masters that the optimizer has beyond them."""
    if sharding == BUCKETS:
        return [key for key in infos if key.kind in (Kind.weight, Kind.buffer)]
    found = list(infos)
    with_state = {key.name: None for key in infos if key.kind not in (Kind.weight, Kind.buffer)}
    for name in with_state:
        is_rounded = infos[Key(name, Kind.weight)].dtype != torch.float32
        if Key(name, Kind.main) not in infos and (is_rounded or _is_distributed(name, infos, sharding)):
            found.append(Key(name, Kind.main))
    return found


def _is_distributed(name: str, infos: Mapping[Key, Info], sharding: str) -> bool:
    return sharding.endswith("fully_reshardable") and Key(name, Kind.momentum) not in infos


def _prefixes(source: Source, target: Target, sharding: str) -> dict[str, str]:
    chain = members(source, target.ep > 1)
    chained = sharding in ("layer_wise", "chained") and len(chain) > 1
    return {name: f"chained_{index}." if chained else "" for index, member in enumerate(chain) for name in member.names}


def _prefix(key: Key, prefixes: Mapping[str, str], infos: Mapping[Key, Info], sharding: str) -> str:
    if key.kind in (Kind.weight, Kind.buffer):
        return ""
    kind = key.kind
    if kind == Kind.main:
        kind = "param" if _is_distributed(key.name, infos, sharding) else "fp32_param"
    return f"{prefixes.get(key.name, '')}optimizer.state.{kind}."


def _has_master(infos: Mapping[Key, Info], name: str) -> bool:
    weight = infos.get(Key(name, Kind.weight))
    return Key(name, Kind.main) in infos or (weight is not None and weight.dtype == torch.float32)


def _is_float32(infos: Mapping[Key, Info]) -> bool:
    return not any(key.kind == Kind.weight and info.dtype != torch.float32 for key, info in infos.items())


def _stacks(
    stored: list[tuple[str, Key]], infos: Mapping[Key, Info], style: Style, moe: frozenset[str]
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    indices: dict[str, list[tuple[int, ...]]] = {}
    own: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for prefix, key in stored:
        where = place(key.name, style, moe)
        name = f"{prefix}{where.key}"
        indices.setdefault(name, []).append(where.index)
        weight = infos[Key(key.name, Kind.weight)] if key not in infos else infos[key]
        own[name] = (weight.shape, weight.dtype if key in infos else torch.float32)
    found = []
    for name, places in indices.items():
        leading = tuple(max(place[dim] for place in places) + 1 for dim in range(len(places[0])))
        found.append((name, (*leading, *own[name][0]), own[name][1]))
    return found
