"""MindSpeed's adaptor for our trainer, which has no command line in Megatron's style."""

from collections.abc import Mapping
from typing import Any

from hp_muon_plugin.config.choices import PlatformName, Precision
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.platform import mindspeed
from hp_muon_plugin.platform.base import Platform


def adapt(platform: Platform, arguments: Mapping[str, Any]) -> None:
    """Have MindSpeed patch Megatron, on NPUs where it is installed. Before Megatron is imported.

    Not run on hardware.

    Args:
        platform: Chosen platform.
        arguments: From :func:`megatron_arguments`.
    """
    if platform.name is PlatformName.npu and mindspeed.is_installed():
        mindspeed.adapt(arguments)


def megatron_arguments(config: Train) -> dict[str, Any]:
    """What Megatron's own parser would have read for a model like this: MindSpeed decides by it what to patch.

    Args:
        config: Options.

    Returns:
        Values by the names that the parser gives them.
    """
    model, topology, moe = config.model, config.topology, config.model.moe
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.mla is None,
        "num_query_groups": model.num_query_groups,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "multi_latent_attention": model.mla is not None,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "transformer_impl": "local",
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "sequence_parallel": topology.sequence_parallel,
        "bf16": config.platform.precision is Precision.bf16,
        "fp16": False,
        "micro_batch_size": config.run.micro_batch_size,
        "global_batch_size": config.run.global_batch_size,
        "optimizer": "adam",
        "reset_attention_mask": config.data.reset_attention_mask,
    }
    if moe is not None:
        values |= {
            "num_experts": moe.num_experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
            "moe_grouped_gemm": moe.grouped_gemm,
            "moe_token_dispatcher_type": str(moe.dispatcher),
        }
    return values
