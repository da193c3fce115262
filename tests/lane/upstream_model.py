"""The fixtures' model, wrapper, optimizer and schedule, of megatron-core itself."""

from dataclasses import fields
from typing import Any

import torch

from hp_muon_plugin.models.gpt import _NO_FUSIONS

SEQ = 16
VOCAB = 125
PADDED = 128


def model_of(body: dict[str, Any]) -> torch.nn.Module:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if body["bf16"] else torch.float32
    values: dict[str, Any] = {
        **_NO_FUSIONS,
        **{"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2},
        **{"normalization": "RMSNorm", "qk_layernorm": True, "add_qkv_bias": True, "add_bias_linear": False},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "attention_softmax_in_fp32": True},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": body["bf16"], "params_dtype": dtype},
        **{"pipeline_dtype": dtype, "transformer_impl": "local", "finalize_model_grads_func": finalize_model_grads},
    }
    is_moe, is_mixed = body["arch"].startswith("moe"), body["arch"] == "moe_het"
    if is_moe:
        values |= {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
        values |= {"moe_router_topk": 2, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        values |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}
        values |= {"expert_model_parallel_size": body["ep"]}
    if is_mixed:
        values["moe_layer_freq"] = [0, 1]
    known = {field.name for field in fields(TransformerConfig)}
    config = TransformerConfig(**{key: value for key, value in values.items() if key in known})
    if is_mixed:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        experts = 4 if is_moe else None
        spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=bool(body["tied"]),
    )


def wrapped_of(body: dict[str, Any], inner: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=body["distributed_optimizer"],
        overlap_grad_reduce=body["bucket_size"] is not None,
        bucket_size=body["bucket_size"],
    )
    module = Float16Module(inner.config, inner) if body["bf16"] else inner
    if body.get("lw_layout"):
        from megatron.training.training import wrap_model_chunks_with_ddp

        return wrap_model_chunks_with_ddp([module], inner.config, options, use_layer_wise_distributed_optimizer=True)[0]
    model = DistributedDataParallel(inner.config, options, module)
    if body["bucket_size"] is not None:
        inner.config.no_sync_func = model.no_sync
    return model


def optimizer_of(body: dict[str, Any], model: Any, clip: float) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    values: dict[str, Any] = {
        **{"optimizer": body["optimizer"], "lr": 0.01, "min_lr": 0.001, "weight_decay": 0.1, "clip_grad": clip},
        **{"adam_beta1": 0.9, "adam_beta2": 0.95, "bf16": body["bf16"]},
        **{"params_dtype": torch.bfloat16 if body["bf16"] else torch.float32},
        **{"use_distributed_optimizer": body["distributed_optimizer"]},
    }
    if body["layer_wise"]:
        values["use_layer_wise_distributed_optimizer"] = True
    return get_megatron_optimizer(OptimizerConfig(**values), [model])


def schedule_of(body: dict[str, Any], optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    values = {key: value for key, value in body["scheduler"].items() if key != "num_steps"}
    return OptimizerParamScheduler(optimizer, init_lr=0.0, use_checkpoint_opt_param_scheduler=False, **values)
