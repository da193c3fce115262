"""Facts of a model that Hugging Face's names and configuration need: family, heads, vocabulary."""

from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Kind, Source, Target
from hp_muon_plugin.checkpoint.formats import names
from hp_muon_plugin.checkpoint.formats.hf_heads import Heads
from hp_muon_plugin.checkpoint.formats.hf_names import FAMILIES, Family
from hp_muon_plugin.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


def family_of(source: Source, target: Target) -> Family:
    """The family whose names fit a model: by its attention, experts and norms, or by the option ``family``.

    Args:
        source: The checkpoint.
        target: Its options.

    Raises:
        ConfigError: If the option is no family, or first layers are not gated.
    """
    shapes = _shapes(source)
    firsts = [name for name in shapes if names.FIRST.search(name) and name.endswith("weight")]
    plain = [name for name in firsts if not names.is_gated(name, shapes)]
    if plain:
        raise ConfigError("--to", "hf", f"{plain[0]} has no gate, which every known family has", "another format")
    wanted = target.options.get("family") or source.state().model.get("family")
    if wanted is not None:
        if wanted not in FAMILIES:
            raise ConfigError("--option family", wanted, "no family that is known", f"one of {', '.join(FAMILIES)}")
        return FAMILIES[str(wanted)]
    if any("linear_kv_up_proj" in name for name in shapes):
        return FAMILIES["deepseek_v3"]
    experts = any(names.is_expert(name) for name in shapes)
    normed = any("q_layernorm" in name for name in shapes)
    shared = any(".shared_experts." in name for name in shapes)
    if experts:
        return FAMILIES["qwen3_moe" if normed and not shared else "qwen2_moe"]
    return FAMILIES["qwen3" if normed else "qwen2"]


def shapes_of(source: Source, target: Target, family: Family) -> tuple[Heads | None, int]:
    """Shape of the attention and number of the decoder's layers.

    Args:
        source: The checkpoint.
        target: Options ``num_attention_heads`` and ``num_query_groups`` overrule what the source says.
        family: Family of the model.

    Raises:
        ConfigError: If neither options, arguments nor shapes tell the heads.
    """
    shapes, args = _shapes(source), source.state().args
    layers = 1 + max((index for name in shapes if (index := names.layer_index(name)) is not None), default=-1)
    fused = next((shape for name, shape in shapes.items() if name.endswith("linear_qkv.weight")), None)
    if family.latent or fused is None:
        return None, layers
    columns = next(shape[1] for name, shape in shapes.items() if name.endswith("self_attention.linear_proj.weight"))
    heads = _number(target, "num_attention_heads") or args.get("num_attention_heads") or _configured_heads(source)
    norms = [shape[0] for name, shape in shapes.items() if name.endswith("self_attention.q_layernorm.weight")]
    if not isinstance(heads, int) and norms:
        heads = columns // norms[0]
    if not isinstance(heads, int) or columns % heads:
        raise ConfigError(
            "--option num_attention_heads",
            heads,
            f"the checkpoint does not tell the number of heads, or one that divides {columns}",
            "say it, as in --option num_attention_heads=32",
        )
    dim = columns // heads
    groups = _number(target, "num_query_groups") or (fused[0] // dim - heads) // 2
    return Heads(heads, groups, dim), layers


def vocabulary(source: Source, target: Target) -> int | None:
    """True size of the vocabulary: rows beyond it are padding and left out. None keeps all rows."""
    return _number(target, "vocab_size") or source.state().vocab_size


def config_of(source: Source, target: Target, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration that transformers reads, from shapes and, where they do not tell, from Megatron's arguments.

    Args:
        source: The checkpoint.
        target: Its options.
        family: Family of the model.
        dtype: Dtype of the weights.
    """
    shapes, args = _shapes(source), source.state().args
    heads, layers = shapes_of(source, target, family)
    embedding = shapes[names.EMBEDDING]
    experts = [index for name in shapes if (index := names.expert_index(name)) is not None]
    mtp = {name.split(".")[2] for name in shapes if name.startswith("mtp.layers.")}
    found: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": embedding[1],
        "num_hidden_layers": layers,
        "vocab_size": vocabulary(source, target) or embedding[0],
        "tie_word_embeddings": names.OUTPUT not in shapes,
        "rms_norm_eps": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-6)),
        "rope_theta": args.get("rotary_base", 10000),
        "max_position_embeddings": args.get("max_position_embeddings", 4096),
        "attention_bias": any(name.endswith("linear_qkv.bias") for name in shapes),
    }
    if heads is not None:
        found |= {"num_attention_heads": heads.heads, "num_key_value_heads": heads.groups, "head_dim": heads.dim}
    else:
        found |= _latent(args)
    found["intermediate_size"] = _half(shapes, ".mlp.linear_fc1.weight") or args.get("ffn_hidden_size")
    if experts:
        found |= {
            ("n_routed_experts" if family.latent else "num_experts"): max(experts) + 1,
            "num_experts_per_tok": args.get("moe_router_topk", 2),
            "moe_intermediate_size": _half(shapes, ".local_experts.0.linear_fc1.weight"),
            "shared_expert_intermediate_size": _half(shapes, ".shared_experts.linear_fc1.weight"),
        }
        dense = [layer for layer in range(layers) if f"decoder.layers.{layer}.mlp.linear_fc1.weight" in shapes]
        if family.latent:
            found["first_k_dense_replace"] = len(dense)
        elif dense:
            found["mlp_only_layers"] = dense
    if mtp:
        found["num_nextn_predict_layers"] = len(mtp)
    return {key: value for key, value in found.items() if value is not None}


def _latent(args: dict[str, Any]) -> dict[str, Any]:
    wanted = {
        "num_attention_heads": "num_attention_heads",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
    }
    return {theirs: args.get(ours) for theirs, ours in wanted.items()}


def _half(shapes: Shapes, suffix: str) -> int | None:
    return next((shape[0] // 2 for name, shape in shapes.items() if name.endswith(suffix)), None)


def _shapes(source: Source) -> Shapes:
    return {key.name: info.shape for key, info in source.tensors().items() if key.kind in (Kind.weight, Kind.main)}


def _configured_heads(source: Source) -> int | None:
    """As the configuration of a run of ours has it."""
    config = source.state().other.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    heads = model.get("num_attention_heads") if isinstance(model, dict) else None
    return heads if isinstance(heads, int) and heads > 0 else None


def _number(target: Target, option: str) -> int | None:
    value = target.options.get(option)
    return None if value is None else int(value)
