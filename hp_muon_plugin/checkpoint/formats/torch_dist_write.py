"""Writer of Megatron's ``torch_dist`` checkpoints, in the form that megatron-core 0.14 to 0.19 load."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, Momentum, Source, Target
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter
from hp_muon_plugin.checkpoint.folders import write_durably
from hp_muon_plugin.checkpoint.formats.torch_dist_common import (
    common_state,
    extra_state_keys,
    groups,
    members,
    optimizer_state,
    random_objects,
    uneven_steps,
)
from hp_muon_plugin.checkpoint.hashing import piece_bytes, pieces
from hp_muon_plugin.checkpoint.megatron_names import Style, is_expert, moe_layers_of, place
from hp_muon_plugin.errors import ConfigError

SHARDINGS = ("fully_reshardable", "none", "layer_wise", "layer_wise_fully_reshardable")
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

    def losses(self, source: Source, target: Target) -> list[str]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        sharding_of(source, target)
        _check_experts(source, target)
        style_of_target(source, target)
        infos, state = source.tensors(), source.state()
        lost = []
        if uneven_steps(source):
            lost.append("step counts: parameters have done different numbers of steps, each group keeps its largest")
        if _unscaled(source):
            lost.append(
                f"momentum of {_unscaled(source)} parameters: Megatron's Muon averages, the buffers here are sums, and "
                "the decay to scale them by is not in the source: they stay sums"
            )
        without = {key.name for key in infos if key.kind not in _FIXED and not _has_master(infos, key.name)}
        if without:
            lost.append(f"masters of {len(without)} parameters: none in the source, the rounded weights will serve")
        _, missing = random_objects(state, target)
        if missing:
            ranks = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            lost.append(
                f"random state of (pipeline, tensor) ranks {ranks}: none in the source; load with --no-load-rng"
            )
        is_by_data_rank = target.megatron is not None and (0, 14) <= target.megatron < (0, 19) and target.ep > 1
        if is_by_data_rank and not missing and not any(".dp" in name for name in state.random):
            lost.append("random state of data ranks, which this version asks for with EP > 1: load with --no-load-rng")
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
        writer = DcpWriter(folder, target.shard_bytes)
        try:
            self._write_tensors(source, writer, target, sharding, count, piece_bytes(budget))
            self._write_objects(source, writer, target)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        expert_parallel = target.ep > 1
        chain = members(source, expert_parallel)
        lists = [groups(member, source.state(), source, expert_parallel) for member in chain]
        optimizer = optimizer_state(chain, lists, sharding, _is_float32(source.tensors())) if chain else {}
        is_converted = not _unscaled(source)
        momentum = Momentum.average if source.state().momentum and is_converted else source.state().momentum
        torch.save(common_state(source, target, optimizer, sharding, momentum), folder / "common.pt")
        write_durably(folder / "metadata.json", json.dumps(_METADATA))

    def _write_tensors(
        self, source: Source, writer: DcpWriter, target: Target, sharding: str, count: Callable[[int], None], piece: int
    ) -> None:
        infos = source.tensors()
        weights = [key.name for key in infos if key.kind == Kind.weight]
        style, moe = style_of_target(source, target), moe_layers_of(weights)
        prefixes = _prefixes(source, target, sharding)
        stored = [(_prefix(key, prefixes, infos, sharding), key) for key in _wanted(infos, sharding)]
        for name, shape, dtype in _stacks(stored, infos, style, moe):
            writer.declare(name, shape, dtype)
        for prefix, key in stored:
            where = place(key.name, style, moe)
            read_key, dtype = key, infos[key].dtype if key in infos else torch.float32
            if key not in infos:
                read_key = Key(key.name, Kind.weight)
            factor = momentum_factor(source, key.name) if key.kind == Kind.momentum else 1.0
            for start, stop in pieces(infos[read_key], piece):
                rows = source.read(read_key, start, stop).to(dtype)
                rows = rows if factor == 1.0 else rows * factor
                stack = rows.view(*(1 for _ in where.index), *rows.shape)
                offsets = (*where.index, start, *(0 for _ in rows.shape[1:])) if rows.dim() else where.index
                writer.write(f"{prefix}{where.key}", stack, offsets)
                count(rows.nbytes)

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


def sharding_of(source: Source, target: Target) -> str:
    """The form in which optimizer state is written.

    Args:
        source: The checkpoint.
        target: What is asked for.

    Raises:
        ConfigError: If it is unknown, or does not fit the optimizer or megatron-core's version.
    """
    has_momentum = any(key.kind == Kind.momentum for key in source.tensors())
    before = source.state().model.get("sharding")
    default = "none" if has_momentum else "fully_reshardable"
    allowed = [name for name in SHARDINGS if has_momentum or not name.startswith("layer_wise")]
    if has_momentum:
        allowed.remove("fully_reshardable")
    wanted = target.sharding or (before if before in allowed else default)
    if wanted not in allowed:
        raise ConfigError("--sharding", wanted, "not written for this optimizer", f"one of {', '.join(allowed)}")
    has_state = any(key.kind not in (Kind.weight, Kind.buffer) for key in source.tensors())
    if target.megatron is not None and target.megatron < (0, 14) and wanted != "none" and has_state:
        raise ConfigError(
            "--megatron",
            ".".join(map(str, target.megatron)),
            f"this version does not load optimizer state in the form {wanted}",
            "use --to torch, which every version loads, or --sharding none without --use-distributed-optimizer",
        )
    return wanted


def style_of_target(source: Source, target: Target) -> Style:
    """How keys are written: as the source had them if it was Megatron, else for the local layer specification.

    Args:
        source: The checkpoint.
        target: Its options ``layers`` (stacked or separate) and ``spec`` (local or te) overrule.

    Raises:
        ConfigError: If an option is unknown, or layers differ and cannot be stacked.
    """
    model = source.state().model
    infos = source.tensors()
    homogeneous = _are_homogeneous(infos)
    layers = _choice(target, "layers", ("stacked", "separate"))
    if layers == "stacked" and not homogeneous:
        raise ConfigError("layers", layers, "layers of this model differ", "leave it out, or write layers=separate")
    default = "separate" if _freq_is_list(source.state().args) else "stacked"
    layers = layers or model.get("layers") or default
    if layers == "stacked" and not homogeneous:
        layers = "separate"
    spec = _choice(target, "spec", ("local", "te"))
    latent = any(".linear_kv_down_proj." in key.name for key in infos)
    norms = model.get("norms_with_linear")
    if spec is not None or norms is None:
        is_te = spec == "te"
        norms = [
            name
            for name, fused in (("input", not latent), ("mlp", True), ("moe", not is_te), ("latent", is_te and latent))
            if fused
        ]
    return Style(layers == "stacked", "input" in norms, "mlp" in norms, "moe" in norms, "latent" in norms)


def _choice(target: Target, option: str, choices: tuple[str, str]) -> str | None:
    value = target.options.get(option)
    if value is not None and value not in choices:
        raise ConfigError(f"--option {option}", value, "no such choice", f"one of {', '.join(choices)}")
    return value


def _freq_is_list(args: Mapping[str, Any]) -> bool:
    freq = args.get("moe_layer_freq")
    return isinstance(freq, list) or (isinstance(freq, int) and freq > 1)


def _are_homogeneous(infos: Mapping[Key, Info]) -> bool:
    layers: dict[str, dict[str, set[tuple[str, Info]]]] = {}
    for key, info in infos.items():
        stack, found, rest = key.name.partition("decoder.layers.")
        if found and not stack:
            number, _, name = rest.partition(".")
            layers.setdefault(key.kind, {}).setdefault(number, set()).add((name, info))
    return all(len({frozenset(item) for item in kind.values()}) <= 1 for kind in layers.values())


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
    decay = state.hyper.get(name, {}).get("momentum")
    if state.momentum is not Momentum.sum or not isinstance(decay, int | float) or not 0 <= decay < 1:
        return 1.0
    return 1.0 - float(decay)


def _unscaled(source: Source) -> int:
    if source.state().momentum is not Momentum.sum:
        return 0
    return sum(key.kind == Kind.momentum and momentum_factor(source, key.name) == 1.0 for key in source.tensors())


def _wanted(infos: Mapping[Key, Info], sharding: str) -> list[Key]:
    """Tensors to write: all, and the masters that the optimizer has beyond them."""
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
    chained = sharding == "layer_wise" and len(chain) > 1
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
