"""What a Megatron trainer may hand over and we cannot train right: refused before step 0, with the way out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.megatron.groups import MegatronGroups
from hp_muon_plugin.megatron.views import down_projection_pieces
from hp_muon_plugin.muon.gradients import listed
from hp_muon_plugin.muon.names import refuse_sharded

_REFUSED_ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    ("layer_wise_distributed_optimizer", "belongs to Megatron's own Muon", "choose a name without 'dist'"),
    ("dump_param_to_param_group_map", "is not written", "the routing table is logged by rank 0"),
)
_DOWN_PROJECTIONS = ("linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Arguments of the factory that would be ignored.

    Args:
        arguments: By name.

    Raises:
        ConfigError: If one was given.
        ConfigErrors: If several were.
    """
    raise_all(
        [ConfigError(name, arguments[name], why, fix) for name, why, fix in _REFUSED_ARGUMENTS if arguments.get(name)]
    )


def refuse_wrappers(chunks: Sequence[torch.nn.Module]) -> None:
    """Wrappers other than Megatron's DistributedDataParallel without sharding.

    Args:
        chunks: Model chunks as the factory got them.

    Raises:
        ConfigError: Naming the wrapper or the option.
    """
    for chunk in chunks:
        refuse_sharded(
            "model_chunks",
            chunk.named_parameters(),
            "wrap the model with megatron.core.distributed.DistributedDataParallel (--use-torch-fsdp2 and "
            "--use-megatron-fsdp left out), or take optimizer=adam",
        )
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is None:
            raise ConfigError(
                "model_chunks",
                type(chunk).__name__,
                "hp_muon reads gradients from Megatron's DistributedDataParallel, and this is another wrapper",
                "wrap the model with megatron.core.distributed.DistributedDataParallel",
            )
        for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_distributed_optimizer"):
            if getattr(ddp_config, name, False):
                raise ConfigError(
                    f"ddp_config.{name}", True, "shards parameters in a way that cuts matrices", f"set {name}=False"
                )


def refuse_unreduced(specs: Mapping[torch.nn.Parameter, ParamSpec]) -> None:
    """Parameters whose gradient the wrapper does not reduce: ranks would train them apart.

    Args:
        specs: Spec of every parameter.

    Raises:
        ConfigError: Naming them.
    """
    names = [spec.name for param, spec in specs.items() if spec.trainable and not hasattr(param, "main_grad")]
    if names:
        raise ConfigError(
            "model_chunks",
            listed(names),
            "was frozen when the model was wrapped, so its gradient is in no buffer and is not reduced over ranks",
            "wrap the model after unfreezing",
        )


def refuse_split_latent(chunks: Sequence[torch.nn.Module]) -> None:
    """Multi-latent attention whose down projections are split over tensor-parallel ranks.

    megatron-core gathers their output and cuts the gradient again, but every rank's own heads read the
    rotary key, so its gradient is a share of the sum, on all tested versions (a test shows it). Transformer
    Engine's layers hold these projections whole on every rank.

    Args:
        chunks: Model chunks, wrapped or not.

    Raises:
        ConfigError: With the ways out.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            config: Any = getattr(module, "config", None)
            weight, last = getattr(module, "weight", None), name.rpartition(".")[2]
            if last not in _DOWN_PROJECTIONS or weight is None or not hasattr(config, "kv_lora_rank"):
                continue
            pieces = down_projection_pieces(f"{last}.weight", config) or []
            if weight.shape[0] < sum(rows for _, rows in pieces):
                raise ConfigError(
                    "tensor_model_parallel_size",
                    config.tensor_model_parallel_size,
                    f"megatron-core's multi-latent attention splits {last} over these ranks and then computes a wrong "
                    "gradient of the rotary key",
                    "set it to 1 (topology.tp=1), or take Transformer Engine's layers (megatron-core 0.16 or later)",
                )


def refuse_own_qk_clip(chunks: Sequence[torch.nn.Module]) -> None:
    """megatron-core's own QK-clip, which its training loop runs after the optimizer's step.

    It scales the model's weights and masters of Megatron's own optimizers, so that the next step would bring
    the weights of before back from ours.

    Args:
        chunks: Model chunks, wrapped or not.

    Raises:
        ConfigError: With the option to take instead.
    """
    for chunk in chunks:
        if any(getattr(getattr(module, "config", None), "qk_clip", False) for module in chunk.modules()):
            raise ConfigError(
                "qk_clip",
                True,
                "megatron-core scales bf16 weights and not the masters of this optimizer, which overwrite them",
                "set qk_clip=False in TransformerConfig, and install({'qk_clip': 100.0}) or another threshold",
            )


def refuse_late_gradients(chunks: Sequence[torch.nn.Module], groups: MegatronGroups) -> None:
    """``overlap_backward`` where megatron-core's ``finalize_model_grads`` changes gradients after backward.

    Args:
        chunks: Model chunks.
        groups: Megatron's groups.

    Raises:
        ConfigError: Naming what changes them.
    """
    config: Any = chunks[0].config
    late: list[tuple[str, object, str]] = []
    if groups.tp.size > 1:
        late.append(("tp", groups.tp.size, "adds up gradients of weights that tensor-parallel ranks hold whole"))
    if groups.dense_stats.size > groups.tp.size:
        late.append(("pp", groups.dense_stats.size // groups.tp.size, "adds up those of embeddings on two stages"))
    if config.calculate_per_token_loss:
        late.append(("calculate_per_token_loss", True, "divides gradients by the tokens of the whole step"))
    raise_all(
        [
            ConfigError(
                "optimizer.overlap_backward",
                f"true with {name}={value}",
                f"begins a step with gradients as backward leaves them, and megatron-core {why} afterwards",
                "set optimizer.overlap_backward=false",
            )
            for name, value, why in late
        ]
    )
