"""Megatron's arguments of a model's shape, for checkpoints of trainers that have none.

Megatron's ``load_checkpoint`` compares ``num_layers``, ``hidden_size`` and ``num_attention_heads`` with its own, and
stops with an AttributeError where the checkpoint's arguments lack one.
"""

import logging
from typing import Any

from hp_muon_plugin.checkpoint.canonical import Kind, Source, Target
from hp_muon_plugin.checkpoint.formats import names

logger = logging.getLogger(__name__)

HEADS = "num_attention_heads"
_COMPARED = ("num_layers", "hidden_size", HEADS)


def model_args(source: Source, target: Target) -> dict[str, Any]:
    """What the source's arguments lack and its tensors, its run of ours or an option tell.

    Args:
        source: What is written.
        target: Its option ``num_attention_heads`` goes before all but the source's arguments.

    Returns:
        Arguments to add; none for a checkpoint of Megatron.
    """
    had = source.state().args
    if all(name in had for name in _COMPARED):
        return {}
    kinds = (Kind.weight, Kind.main)
    shapes = {key.name: info.shape for key, info in source.tensors().items() if key.kind in kinds}
    layers = [index for name in shapes if (index := names.layer_index(name)) is not None]
    found: dict[str, Any] = {"num_layers": max(layers) + 1} if layers else {}
    if names.EMBEDDING in shapes:
        found["hidden_size"] = shapes[names.EMBEDDING][1]
    found |= _attention(source, target, shapes)
    if layers and HEADS not in {**had, **found}:
        logger.warning(
            "%s: neither names nor shapes tell the number of attention heads, without which Megatron's "
            "load_checkpoint stops; say it, as in --option %s=32",
            source.path,
            HEADS,
        )
    return {name: value for name, value in found.items() if name not in had}


def _attention(source: Source, target: Target, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    state, given = source.state(), target.options.get(HEADS)
    heads = int(given) if given else state.args.get(HEADS) or state.model.get(HEADS)
    fused = _first(shapes, ".self_attention.linear_qkv.weight")
    norm, output = _first(shapes, ".self_attention.q_layernorm.weight"), _first(shapes, ".linear_proj.weight")
    if not isinstance(heads, int) and fused and norm and output:
        heads = output[1] // norm[0]
    if not isinstance(heads, int):
        return {}
    if not (fused and output) or output[1] % heads:
        return {HEADS: heads}
    dim = output[1] // heads
    groups = (fused[0] // dim - heads) // 2
    return {HEADS: heads, "kv_channels": dim, "num_query_groups": groups, "group_query_attention": groups != heads}


def _first(shapes: dict[str, tuple[int, ...]], suffix: str) -> tuple[int, ...] | None:
    return next((shape for name, shape in shapes.items() if name.endswith(suffix)), None)
