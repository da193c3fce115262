"""Whether megatron-core can build the model, and spread it over the ranks as asked."""

from collections.abc import Iterator

from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.errors import ConfigError

_Division = tuple[str, int, str, int]


def model_errors(model: Model, topology: Topology) -> Iterator[ConfigError]:
    """Check sizes that must divide each other.

    Args:
        model: Options, every number in its range.
        topology: Options, every number in its range.

    Yields:
        One error for each thing that is wrong.
    """
    for option, value, divisor_option, divisor in [*_shape_divisions(model), *_rank_divisions(model, topology)]:
        if value % divisor:
            yield ConfigError(
                option,
                value,
                f"is not divisible by {divisor_option}={divisor}",
                f"choose a multiple of {divisor} for {option}, or a divisor of {value} for {divisor_option}",
            )
    yield from _rotary_errors(model)
    if model.mla is not None and topology.tp > 1:
        yield ConfigError(
            "topology.tp",
            topology.tp,
            "megatron-core's latent attention without Transformer Engine gives the rotary key only a share of its "
            "gradient when it is split",
            "set topology.tp=1 for models with model.mla",
        )
    if model.moe is None:
        yield from _dense_errors(model, topology)
    else:
        yield from _moe_errors(model, topology)


def _shape_divisions(model: Model) -> Iterator[_Division]:
    heads = ("model.num_attention_heads", model.num_attention_heads)
    yield ("model.hidden_size", model.hidden_size, *heads)
    if model.mla is None:
        yield (*heads, "model.num_query_groups", model.num_query_groups)


def _rank_divisions(model: Model, topology: Topology) -> Iterator[_Division]:
    tp, etp = ("topology.tp", topology.tp), ("topology.etp", topology.etp)
    yield ("model.num_layers", model.num_layers, "topology.pp", topology.pp)
    yield ("model.num_attention_heads", model.num_attention_heads, *tp)
    if topology.sequence_parallel:
        yield ("model.seq_length", model.seq_length, *tp)
    if model.moe is None or model.moe.first_dense_layers:
        yield ("model.ffn_hidden_size", model.ffn_hidden_size, *tp)
    if model.moe is None:
        return
    yield ("model.moe.num_experts", model.moe.num_experts, "topology.ep", topology.ep)
    yield ("model.moe.ffn_hidden_size", model.moe.ffn_hidden_size, *etp)
    if model.moe.shared_ffn_hidden_size is not None:
        yield ("model.moe.shared_ffn_hidden_size", model.moe.shared_ffn_hidden_size, *tp)


def _rotary_errors(model: Model) -> Iterator[ConfigError]:
    """RoPE turns pairs of numbers."""
    if model.mla is not None:
        size = model.mla.qk_pos_emb_head_dim
        if size % 2:
            yield ConfigError(
                "model.mla.qk_pos_emb_head_dim",
                size,
                "RoPE turns pairs of numbers, and this is odd",
                f"e.g. model.mla.qk_pos_emb_head_dim={size + 1}",
            )
    elif model.hidden_size % (2 * model.num_attention_heads) == model.num_attention_heads:
        heads = model.num_attention_heads
        yield ConfigError(
            "model.hidden_size",
            model.hidden_size,
            f"gives each of {heads} heads {model.hidden_size // heads} numbers; RoPE turns pairs, and this is odd",
            f"choose a multiple of {2 * heads}, e.g. model.hidden_size={model.hidden_size + heads}",
        )


def _dense_errors(model: Model, topology: Topology) -> Iterator[ConfigError]:
    for name in ("ep", "etp"):
        if getattr(topology, name) > 1:
            yield ConfigError(
                f"topology.{name}",
                getattr(topology, name),
                f"model={model.name} has no experts to spread",
                f"set topology.{name}=1, or take model=tiny_moe",
            )


def _moe_errors(model: Model, topology: Topology) -> Iterator[ConfigError]:
    assert model.moe is not None
    if model.moe.first_dense_layers >= model.num_layers:
        yield ConfigError(
            "model.moe.first_dense_layers",
            model.moe.first_dense_layers,
            f"leaves none of model.num_layers={model.num_layers} layers to the experts",
            f"choose less than {model.num_layers}, or set model.moe=null",
        )
    if model.moe.top_k > model.moe.num_experts:
        yield ConfigError(
            "model.moe.top_k",
            model.moe.top_k,
            f"a token cannot visit {model.moe.top_k} of {model.moe.num_experts} experts",
            f"choose 1 to {model.moe.num_experts}",
        )
    if topology.tp > 1 and not topology.sequence_parallel:
        yield ConfigError(
            "topology.sequence_parallel",
            False,
            "megatron-core trains experts under tensor parallelism with sequence parallelism only",
            "set topology.sequence_parallel=true, or topology.tp=1",
        )
