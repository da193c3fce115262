"""Writer of Hugging Face safetensors: weights only, with a configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import kinds_by_name, stored_weight
from hp_muon_plugin.checkpoint.formats.hf import CONFIG, INDEX, NAME
from hp_muon_plugin.checkpoint.formats.hf_config import config_of, family_of, shapes_of, vocabulary
from hp_muon_plugin.checkpoint.formats.hf_heads import Heads, split
from hp_muon_plugin.checkpoint.formats.hf_names import Family, fused
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.megatron_names import registration_order
from hp_muon_plugin.checkpoint.safetensors_files import write_file
from hp_muon_plugin.errors import ConfigError


class HfWriter:
    """Writes weights as transformers names them; what training needs beyond them is lost, and listed.

    Options: ``family``, ``vocab_size``, ``num_attention_heads``, ``num_query_groups`` where the source does not say.
    """

    format = NAME

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        _planned(source, target)
        counts: dict[str, int] = {}
        for key in source.tensors():
            if key.kind not in (Kind.weight, Kind.buffer):
                counts[key.kind] = counts.get(key.kind, 0) + 1
        found = [
            Loss(f"{'float32 masters' if kind == Kind.main else kind} of {count} parameters", kinds={kind})
            for kind, count in counts.items()
        ]
        state = source.state()
        for what, value in (
            ("iteration", state.iteration),
            ("steps of the optimizer", state.steps),
            ("values of parameter groups", state.hyper),
            ("learning-rate schedule", state.scheduler),
            ("random state", state.random),
            ("position in the data", state.data or state.consumed_samples),
        ):
            if value:
                steps = state.steps if value is state.steps else ()
                found.append(Loss(what, steps=steps, has_iteration=what != "iteration"))
        return found

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        family, stored = _planned(source, target)
        files: list[dict[str, Lazy]] = [{}]
        size = 0
        for name, value in stored.items():
            if files[-1] and size + value.nbytes > target.shard_bytes:
                files.append({})
                size = 0
            files[-1][name] = value
            size += value.nbytes
        place: dict[str, str] = {}
        for index, tensors in enumerate(files):
            file = "model.safetensors" if len(files) == 1 else f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
            write_file(folder / file, tensors, count, target.jobs, {"format": "pt"})
            place |= dict.fromkeys(tensors, file)
        total = sum(value.nbytes for value in stored.values())
        if len(files) > 1:
            _put_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": place})
        dtype = next(iter(stored.values())).dtype
        _put_json(folder / CONFIG, config_of(source, target, family, dtype))


def _planned(source: Source, target: Target) -> tuple[Family, dict[str, Lazy]]:
    """All tensors under Hugging Face's names."""
    family = family_of(source, target)
    heads, layers = shapes_of(source, target, family)
    rows = vocabulary(source, target)
    kinds = kinds_by_name(source)
    found: dict[str, Lazy] = {}
    for name in sorted(kinds, key=registration_order):
        parts = fused(name, family, layers)
        if parts is None:
            raise ConfigError(
                "--option family",
                family.name,
                f"these models have no {name}",
                "choose another family, or another format",
            )
        if Kind.buffer in kinds[name]:
            value = lazy.canonical(source, Key(name, Kind.buffer))
        else:
            value = stored_weight(source, name, target.dtype)
        if name in (names.EMBEDDING, names.OUTPUT) and rows is not None:
            value = lazy.padded(value, rows)
        found |= dict(zip(parts.names, _split(value, parts.how, heads, name), strict=True))
    return family, found


def _split(value: Lazy, how: str, heads: Heads | None, name: str) -> list[Lazy]:
    if how == "qkv":
        assert heads is not None
        return split(value, heads, name)
    if how == "gated":
        half = value.shape[0] // 2
        return [lazy.cut_rows(value, 0, half), lazy.cut_rows(value, half, 2 * half)]
    return [value]


def _put_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
