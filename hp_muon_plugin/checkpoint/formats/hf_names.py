"""Names of Hugging Face models for Megatron's modules: the Qwen families and DeepSeek-V3.

One table serves both directions. Fused weights are several names: ``linear_qkv`` is q, k and v, a gated
``linear_fc1`` is gate and up.
"""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"^(?:decoder\.layers\.(?P<layer>\d+)|mtp\.layers\.(?P<mtp>\d+))\.(?P<rest>.+)$")
_MTP_LAYER = re.compile(r"^(transformer_layer|mtp_model_layer)\.")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
_GROUPED = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LATENT = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models is named.

    Attributes:
        name: ``model_type`` of its configuration.
        architecture: Class that transformers loads.
        latent: Whether it has multi-latent attention.
        shared: Name of the shared expert.
        shared_gate: Name of the shared expert's gate.
    """

    name: str
    architecture: str
    latent: bool = False
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", "Qwen3ForCausalLM"),
        Family("qwen2", "Qwen2ForCausalLM"),
        Family("qwen3_moe", "Qwen3MoeForCausalLM"),
        Family("qwen2_moe", "Qwen2MoeForCausalLM"),
        Family("deepseek_v3", "DeepseekV3ForCausalLM", latent=True, shared="mlp.shared_experts"),
    )
}


@dataclass(frozen=True, slots=True)
class Fused:
    """What a canonical tensor is in Hugging Face's names.

    Attributes:
        names: One name; three for q, k and v; two for gate and up.
        how: ``one``, ``qkv`` or ``gated``.
    """

    names: tuple[str, ...]
    how: str = "one"


def fused(name: str, family: Family, num_layers: int) -> Fused | None:
    """Names of a canonical tensor.

    Args:
        name: Canonical name.
        family: Which naming.
        num_layers: Layers of the decoder: those of multi-token prediction follow them.

    Returns:
        None if the family has no such tensor.
    """
    if name in _TOP:
        return Fused((_TOP[name],))
    match = _LAYER.match(name)
    if match is None:
        return None
    layer = int(match["layer"]) if match["layer"] else num_layers + int(match["mtp"])
    rest = _MTP_LAYER.sub("", match["rest"]) if match["mtp"] else match["rest"]
    found = _in_layer(rest, family)
    return found and Fused(tuple(f"model.layers.{layer}.{item}" for item in found.names), found.how)


def _in_layer(rest: str, family: Family) -> Fused | None:
    table = {**_IN_LAYER, **(_LATENT if family.latent else _GROUPED)}
    if rest in table:
        return Fused((table[rest],))
    if not family.latent and (kind := rest.removeprefix("self_attention.linear_qkv.")) in ("weight", "bias"):
        return Fused(tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"), "qkv")
    if rest == "mlp.linear_fc1.weight":
        return Fused(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated")
    if rest == "mlp.shared_experts.gate_weight":
        return Fused((f"{family.shared_gate}.weight",))
    expert = _EXPERT.match(rest)
    prefix, inner = (f"mlp.experts.{expert[1]}", expert[2]) if expert else (family.shared, "")
    if rest.startswith("mlp.shared_experts."):
        inner = rest.removeprefix("mlp.shared_experts.")
    if inner == "linear_fc1.weight":
        return Fused((f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"), "gated")
    return Fused((f"{prefix}.down_proj.weight",)) if inner == "linear_fc2.weight" else None


_INNER = {
    "gate_proj.weight": "linear_fc1.weight",
    "up_proj.weight": "linear_fc1.weight",
    "down_proj.weight": "linear_fc2.weight",
}
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_HF_EXPERT = re.compile(r"^mlp\.experts\.(\d+)\.(.+)$")
_ALIASES = ("embed_tokens.weight", "shared_head.head.weight")


def canonical_of(name: str, family: Family, num_layers: int) -> str | None:
    """Canonical name of the tensor that a Hugging Face tensor is, or is a part of.

    Args:
        name: Hugging Face's name.
        family: Which naming.
        num_layers: Layers of the decoder.

    Returns:
        The name; empty for a copy of a tensor that is stored elsewhere; None if it is not known.
    """
    for ours, theirs in _TOP.items():
        if name == theirs:
            return ours
    match = _HF_LAYER.match(name)
    if match is None:
        return None
    layer, rest = int(match[1]), match[2]
    if layer >= num_layers and rest in _ALIASES:
        return ""
    inner = _canonical_in_layer(rest, family)
    if inner is None:
        return None
    if layer < num_layers:
        return f"decoder.layers.{layer}.{inner}"
    own = inner.split(".")[0] in ("enorm", "hnorm", "eh_proj", "final_layernorm")
    return f"mtp.layers.{layer - num_layers}.{inner if own else f'transformer_layer.{inner}'}"


def _canonical_in_layer(rest: str, family: Family) -> str | None:
    for ours, theirs in {**_IN_LAYER, **(_LATENT if family.latent else _GROUPED)}.items():
        if rest == theirs:
            return ours
    if not family.latent and (match := re.match(r"^self_attn\.[qkv]_proj\.(weight|bias)$", rest)):
        return f"self_attention.linear_qkv.{match[1]}"
    if rest == f"{family.shared_gate}.weight":
        return "mlp.shared_experts.gate_weight"
    expert = _HF_EXPERT.match(rest)
    if expert and expert[2] in _INNER:
        return f"mlp.experts.local_experts.{expert[1]}.{_INNER[expert[2]]}"
    if rest.startswith(f"{family.shared}.") and rest.removeprefix(f"{family.shared}.") in _INNER:
        return f"mlp.shared_experts.{_INNER[rest.removeprefix(f'{family.shared}.')]}"
    return f"mlp.{_INNER[rest.removeprefix('mlp.')]}" if rest.removeprefix("mlp.") in _INNER else None
