"""Reader of Hugging Face safetensors: weights only."""

import json
from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Key, Kind, RunState
from hp_muon_plugin.checkpoint.files import Files, safe_join
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.base import LazySource, model_facts
from hp_muon_plugin.checkpoint.formats.hf_heads import Heads, join
from hp_muon_plugin.checkpoint.formats.hf_names import FAMILIES, Family, canonical_of, fused
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.safetensors_files import read_header
from hp_muon_plugin.errors import CheckpointError, DamageError

NAME = "hf"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_ARGS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "vocab_size": "vocab_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "num_nextn_predict_layers": "mtp_num_layers",
}


_NUMBERS = ("rms_norm_eps", "rope_theta")
_POSITIVE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def open_hf(path: Path) -> LazySource:
    """Open a model folder with ``config.json`` and one or several safetensors files.

    Args:
        path: The folder.

    Raises:
        CheckpointError: If a file is missing or damaged, the family is not known, or a tensor has no place in it.
    """
    files = Files(path)
    config = _json(files, CONFIG)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{path / CONFIG} names the model type {config.get('model_type')!r}, whose names are not known; known are "
            f"{', '.join(FAMILIES)}"
        )
    _check(path / CONFIG, config, family)
    stored = _stored(files, path)
    tensors = _canonical(path, stored, family, config)
    return LazySource(NAME, path, tensors, lambda: _state(config, family, tensors), files)


def _json(files: Files, name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.read(name, 0, files.size(name)))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{files.folder / name} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DamageError(f"{files.folder / name} holds no object")
    return found


def _check(file: Path, config: dict[str, Any], family: Family) -> None:
    """Refuse a configuration whose fields are missing or no such values."""

    def refuse(field: str, why: str) -> None:
        raise DamageError(f"{file}: {field} {why}\n  fix: copy or download the file again, or correct it")

    needed = {"num_hidden_layers"} if family.latent else {"num_hidden_layers", "num_attention_heads"}
    if not family.latent and config.get("head_dim") is None:
        needed.add("hidden_size")
    for field in sorted(needed):
        if config.get(field) is None:
            refuse(field, "is not there")
    for field in _ARGS:
        value, is_number = config.get(field), field in _NUMBERS
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float if is_number else int):
            refuse(field, f"is {value!r:.50}, not {'a' if is_number else 'a whole'} number")
        elif value < 0 or (value == 0 and field in _POSITIVE):
            refuse(field, f"is {value}, which is too small")
    if not isinstance(config.get("tie_word_embeddings") or False, bool):
        refuse("tie_word_embeddings", f"is {config['tie_word_embeddings']!r:.50}, neither true nor false")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not family.latent and heads and groups and heads % groups:
        refuse("num_key_value_heads", f"is {groups}, which does not divide num_attention_heads, {heads}")


def _stored(files: Files, path: Path) -> dict[str, Lazy]:
    if not (path / INDEX).is_file():
        found: dict[str, Lazy] = {}
        for item in sorted(path.glob("*.safetensors")):
            found |= read_header(files, item.name)
        return found
    place = _json(files, INDEX).get("weight_map")
    if not isinstance(place, dict):
        raise DamageError(f"{path / INDEX} has no weight_map")
    for name, file in place.items():
        if not isinstance(file, str):
            raise DamageError(f"{path / INDEX}: weight_map names {file!r:.50} for {name}, not a file")
    headers: dict[str, dict[str, Lazy]] = {}
    for file in sorted(set(place.values())):
        safe_join(path, file)
        headers[file] = read_header(files, file)
    for name, file in place.items():
        if name not in headers[file]:
            raise DamageError(f"{path / file} should hold {name}, as {INDEX} says, but does not")
    return {name: headers[file][name] for name, file in place.items()}


def heads_of(config: dict[str, Any]) -> Heads:
    """Shape of the attention that a configuration names."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    return Heads(heads, groups, int(config.get("head_dim") or int(config["hidden_size"]) // heads))


def _canonical(path: Path, stored: dict[str, Lazy], family: Family, config: dict[str, Any]) -> dict[Key, Lazy]:
    layers = int(config["num_hidden_layers"])
    wanted: dict[str, None] = {}
    for name in stored:
        ours = canonical_of(name, family, layers)
        if ours is None:
            raise CheckpointError(f"{path}: {name} has no place in a {family.name} model")
        if ours and not (ours == names.OUTPUT and config.get("tie_word_embeddings")):
            wanted[ours] = None
    found: dict[Key, Lazy] = {}
    for name in wanted:
        parts_of = fused(name, family, layers)
        assert parts_of is not None
        missing = [part for part in parts_of.names if part not in stored]
        if missing:
            raise DamageError(f"{path}: {missing[0]} is in no file, but {parts_of.names[0]} may be")
        parts = [stored[part] for part in parts_of.names]
        for part, value in zip(parts_of.names, parts, strict=True):
            like = parts[0]
            if len(parts) > 1 and (not value.shape or (value.shape[1:], value.dtype) != (like.shape[1:], like.dtype)):
                raise DamageError(
                    f"{path}: {part} is {value.dtype} of shape {tuple(value.shape)}, which does not fit "
                    f"{parts_of.names[0]}, {like.dtype} of shape {tuple(like.shape)}"
                )
        value = join(parts, heads_of(config), name) if parts_of.how == "qkv" else lazy.rows_of(parts)
        found[Key(name, Kind.buffer if names.is_buffer(name) else Kind.weight)] = value
    return found


def _state(config: dict[str, Any], family: Family, tensors: dict[Key, Lazy]) -> RunState:
    args = {ours: config[theirs] for theirs, ours in _ARGS.items() if config.get(theirs) is not None}
    args |= {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "group_query_attention": not family.latent,
        "multi_latent_attention": family.latent,
        "untie_embeddings_and_output_weights": Key(names.OUTPUT, Kind.weight) in tensors,
        "qk_layernorm": any("q_layernorm" in key.name for key in tensors),
        "add_qkv_bias": any(key.name.endswith("linear_qkv.bias") for key in tensors),
    }
    vocabulary = config.get("vocab_size")
    return RunState(
        vocab_size=int(vocabulary) if vocabulary is not None else None,
        args=args,
        model={**model_facts([key.name for key in tensors]), "family": family.name},
    )
