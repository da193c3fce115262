"""megatron-core's own GPTModel from our options, on every tested version."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.trainer import Model, MoE, Topology
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.local_fixes import apply_local_fixes
from hp_muon_plugin.megatron.refusals import refuse_split_latent


def transformer_config(model: Model, topology: Topology, precision: Precision) -> TransformerConfig:
    """megatron-core's configuration of the model.

    Args:
        model: Options.
        topology: Options.
        precision: Compute type.

    Returns:
        The configuration. Fusions that need Transformer Engine, Apex or CUDA are off.
    """
    cls = TransformerConfig if model.mla is None else MLATransformerConfig
    values = _layer_values(model) | _attention_values(model) | _parallel_values(topology, precision) | _NO_FUSIONS
    if model.moe is not None:
        values |= _moe_values(model.moe, topology)
        dense = model.moe.first_dense_layers
        if dense:
            values["moe_layer_freq"] = [int(layer >= dense) for layer in range(model.num_layers)]
    known = {field.name for field in fields(cls)}
    if "transformer_impl" in known:
        values["transformer_impl"] = "local"
    unknown = sorted(set(values) - known)
    assert not unknown, unknown
    return cls(**values)


_NO_FUSIONS: dict[str, Any] = {
    "use_cpu_initialization": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


def _layer_values(model: Model) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "init_method_std": model.init_std,
    }


def _attention_values(model: Model) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_attention_heads": model.num_attention_heads,
        "attention_dropout": 0.0,
        "qk_layernorm": model.qk_layernorm,
        "attention_softmax_in_fp32": True,
    }
    if model.mla is None:
        return values | {"num_query_groups": model.num_query_groups}
    values |= {"multi_latent_attention": True, "rope_type": "rope", "rotary_base": model.rotary_base}
    return values | {field.name: getattr(model.mla, field.name) for field in fields(model.mla)}


def _parallel_values(topology: Topology, precision: Precision) -> dict[str, Any]:
    dtype = torch.bfloat16 if precision is Precision.bf16 else torch.float32
    return {
        "bf16": precision is Precision.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "sequence_parallel": topology.sequence_parallel,
    }


def _moe_values(moe: MoE, topology: Topology) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        # A softmax over the one chosen expert is always 1: the router would have no gradient, and Megatron refuses it.
        "moe_router_pre_softmax": moe.top_k == 1,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": moe.aux_loss_coeff,
        "moe_grouped_gemm": moe.grouped_gemm,
        "moe_token_dispatcher_type": str(moe.dispatcher),
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
    }


def build_gpt(config: TransformerConfig, model: Model, vocab_size: int) -> torch.nn.Module:
    """The part of the model that belongs to this pipeline stage, ready to be wrapped and trained.

    megatron-core's slips in models without Transformer Engine are repaired first: megatron/local_fixes.py.

    Args:
        config: From :func:`transformer_config`. Parallel state must be initialised.
        model: Options.
        vocab_size: Padded vocabulary.

    Returns:
        A ``GPTModel``, inside ``Float16Module`` for bf16.

    Raises:
        ConfigError: If megatron-core cannot build it on this machine, or would train it wrong.
    """
    apply_local_fixes()
    module = gpt_model(config, model, vocab_size)
    refuse_split_latent([module])
    return Float16Module(config, module) if config.bf16 else module


def gpt_model(config: TransformerConfig, model: Model, vocab_size: int) -> torch.nn.Module:
    """megatron-core's GPTModel of this pipeline stage, as it is.

    Args:
        config: From :func:`transformer_config`.
        model: Options.
        vocab_size: Padded vocabulary.

    Returns:
        A ``GPTModel``.

    Raises:
        ConfigError: If megatron-core cannot build it on this machine.
    """
    if model.moe is not None and model.moe.first_dense_layers:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=model.mla is not None,
            normalization="RMSNorm",
        )
    return _explained(
        lambda: GPTModel(
            config,
            spec,
            vocab_size=vocab_size,
            max_sequence_length=model.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=model.tie_embeddings,
        ),
        model,
    )


def _explained(build: Callable[[], torch.nn.Module], model: Model) -> torch.nn.Module:
    try:
        return build()
    except (ImportError, AssertionError) as error:
        if model.moe is None or not model.moe.grouped_gemm:
            raise
        raise ConfigError(
            "model.moe.grouped_gemm",
            True,
            f"megatron-core has no kernel for its grouped experts here ({error})",
            "set model.moe.grouped_gemm=false, or install Transformer Engine or grouped_gemm",
        ) from error
