"""Names of megatron-core's GPT model: canonical ones, and the keys of its sharded checkpoints.

A sharded key stands for a stack: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` of shape ``(L, E, ...)``
is the weight of every expert of every layer. Norms are stored under the name of the linear layer that they precede,
because Transformer Engine fuses them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hp_muon_plugin.checkpoint.canonical import Kind

_STACK = re.compile(r"((?:^|.*\.)(?:decoder|encoder)\.layers\.)(?!\d)(.+)\Z")
_LAYER = re.compile(r"((?:^|.*\.)(?:decoder|encoder)\.layers\.)(\d+)\.(.+)\Z")
_EXPERT_STACK = re.compile(r"(.*\.mlp\.experts\.)experts\.(linear_fc[12]\..+)\Z")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\..+)\Z")
_FUSED_NORM = re.compile(r"(.*?)(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)\Z")
_FUSED_LATENT = re.compile(r"(.*\.self_attention\.)linear_(q|kv)_up_proj\.layer_norm_(weight|bias)\Z")
_NORM = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
_BUFFERS = re.compile(r"\.router\.(expert_bias|local_tokens_per_expert)\Z")
_PREDICTION = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")
_SPLIT = re.compile(r"\.(weight|bias)_[wv]\Z")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a canonical tensor lies in sharded keys.

    Attributes:
        key: The sharded key.
        index: Index in its leading dimensions: layer, expert, both or none.
    """

    key: str
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Style:
    """How a checkpoint writes its keys.

    Attributes:
        stacked: Whether layers are stacked.
        fused_input: Whether ``input_layernorm`` is stored with ``linear_qkv``.
        fused_mlp: Whether ``pre_mlp_layernorm`` is stored with ``linear_fc1`` in layers without experts.
        fused_moe: The same in layers with experts: the local specification does, Transformer Engine's does not.
        fused_latent: Whether ``q_layernorm`` and ``kv_layernorm`` of latent attention are stored with ``*_up_proj``.
    """

    stacked: bool = True
    fused_input: bool = True
    fused_mlp: bool = True
    fused_moe: bool = True
    fused_latent: bool = False


def expand(key: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """The canonical tensors of a sharded key.

    Args:
        key: As in the checkpoint, without the optimizer's prefix.
        shape: Of the whole stack.

    Returns:
        Place of each canonical name.
    """
    found = {key: Place(key, ())}
    stack = _STACK.match(key)
    if stack:
        found = {f"{stack[1]}{layer}.{stack[2]}": Place(key, (layer,)) for layer in range(shape[0])}
    experts = _EXPERT_STACK.match(key)
    if experts:
        count = shape[1 if stack else 0]
        found = {
            _local_expert(name, expert): Place(key, (*place.index, expert))
            for name, place in found.items()
            for expert in range(count)
        }
    return {unfused(name): place for name, place in found.items()}


def unfused(name: str) -> str:
    """The canonical name of a norm that is stored with the linear layer behind it, and of a layer that predicts tokens.

    That layer's module is ``transformer_layer`` or, in later versions, ``mtp_model_layer``; sharded keys always have
    the first. Other names stay.
    """
    name = _PREDICTION.sub(r"\1transformer_layer.", name)
    norm = _FUSED_NORM.match(name)
    if norm:
        return f"{norm[1]}{_NORM[norm[2]]}.{norm[3]}"
    latent = _FUSED_LATENT.match(name)
    return f"{latent[1]}{latent[2]}_layernorm.{latent[3]}" if latent else name


def place(name: str, style: Style, moe_layers: frozenset[str]) -> Place:
    """Where a canonical tensor goes.

    Args:
        name: Canonical name.
        style: How the target writes keys.
        moe_layers: Prefixes of the layers with experts, from :func:`moe_layers_of`.
    """
    name = _fused(name, style, moe_layers)
    index: tuple[int, ...] = ()
    expert = _EXPERT.match(name)
    if expert:
        name, index = f"{expert[1]}experts.{expert[3]}", (int(expert[2]),)
    layer = _LAYER.match(name)
    if layer and style.stacked:
        name, index = f"{layer[1]}{layer[3]}", (int(layer[2]), *index)
    return Place(name, index)


def style_of(keys: Iterable[str]) -> Style:
    """How a checkpoint writes its keys.

    Args:
        keys: Of its model, without optimizer.
    """
    keys = list(keys)
    moe = {key.split("mlp.experts.")[0] for key in keys if ".mlp.experts." in key}
    mlp_norms = [key for key in keys if key.endswith(".pre_mlp_layernorm.weight")]
    return Style(
        stacked=not any(_LAYER.match(key) for key in keys),
        fused_input=not any(key.endswith("input_layernorm.weight") for key in keys),
        fused_mlp=not any(key.removesuffix("pre_mlp_layernorm.weight") not in moe for key in mlp_norms),
        fused_moe=not any(key.removesuffix("pre_mlp_layernorm.weight") in moe for key in mlp_norms),
        fused_latent=any(_FUSED_LATENT.match(key) for key in keys),
    )


def moe_layers_of(names: Iterable[str]) -> frozenset[str]:
    """Prefixes of layers with experts, as ``decoder.layers.3.``."""
    return frozenset(name.split("mlp.experts.")[0] for name in names if ".mlp.experts." in name)


def is_expert(name: str) -> bool:
    """Whether a canonical tensor belongs to one routed expert."""
    return bool(_EXPERT.match(name))


def is_gated(name: str) -> bool:
    """Whether a canonical name may be a gate and an up projection in one: it is, if the model gates at all."""
    return name.endswith((".linear_fc1.weight", ".linear_fc1.bias"))


def is_split(key: str) -> bool:
    """Whether a key holds one half of a gated projection, as ``singleton_local_shards`` and Megatron-FSDP write it."""
    return bool(_SPLIT.search(key))


def weight_kind(name: str) -> Kind:
    """Whether a tensor of the model is a weight or a buffer."""
    return Kind.buffer if _BUFFERS.search(name) else Kind.weight


_ORDER = (
    # Order of registration in megatron-core's constructors; a parameter of a module comes before its children.
    *("embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings", "encoder", "decoder", "mtp"),
    *("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "layers"),
    *("input_layernorm", "self_attention", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj"),
    *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm", "k_layernorm"),
    *("pre_cross_attn_layernorm", "cross_attention", "linear_q", "linear_kv", "pre_mlp_layernorm", "mlp"),
    *("gate_weight", "router", "experts", "local_experts", "shared_experts", "linear_fc1", "linear_fc2"),
    *("layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias"),
    *("final_layernorm", "output_layer"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}


def registration_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts canonical names into the order of ``named_parameters``."""
    return tuple(
        (0, int(part), "") if part.isdigit() else (_RANK.get(part, len(_ORDER)), 0, "" if part in _RANK else part)
        for part in name.split(".")
    )


def _local_expert(name: str, expert: int) -> str:
    return _EXPERT_STACK.sub(rf"\g<1>local_experts.{expert}.\g<2>", name)


def _fused(name: str, style: Style, moe_layers: frozenset[str]) -> str:
    if not _LAYER.match(name) and ".layers." not in name:
        return name
    head, _, tail = name.rpartition(".")
    prefix, _, module = head.rpartition(".")
    if module == "input_layernorm" and style.fused_input:
        return f"{prefix}.self_attention.linear_qkv.layer_norm_{tail}"
    if module == "pre_mlp_layernorm" and (style.fused_moe if f"{prefix}." in moe_layers else style.fused_mlp):
        return f"{prefix}.mlp.linear_fc1.layer_norm_{tail}"
    if module in ("q_layernorm", "kv_layernorm") and style.fused_latent:
        return f"{prefix}.linear_{module.split('_')[0]}_up_proj.layer_norm_{tail}"
    return name
