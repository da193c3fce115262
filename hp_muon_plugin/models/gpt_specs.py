"""The parameters of our GPT models from options alone: no torch, no Megatron, no memory.

Dry runs and plans use this list. A test on every lane compares it with what megatron-core really
builds, name by name and shape by shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.layout.spec import AxisSplit, ParamSpec
from hp_muon_plugin.megatron.roles import megatron_role
from hp_muon_plugin.megatron.views import matrix_view, tensor_parallel_cut

_REPLICATED = -1


@dataclass(frozen=True, slots=True)
class _Weight:
    """Name, whole shape, and the dim that tensor-parallel ranks cut (or none)."""

    name: str
    shape: tuple[int, ...]
    cut: int = _REPLICATED
    is_routed: bool = False


def padded_vocab_size(vocab_size: int, model: Model, topology: Topology) -> int:
    """The vocabulary rounded up so that it splits evenly over tensor-parallel ranks.

    Args:
        vocab_size: Token ids in the data.
        model: Options.
        topology: Options.

    Returns:
        The next multiple of ``model.vocab_multiple * topology.tp``.
    """
    multiple = model.vocab_multiple * topology.tp
    return -(-vocab_size // multiple) * multiple


def gpt_specs(model: Model, topology: Topology, vocab_size: int, options: HpMuon) -> list[ParamSpec]:
    """Specs of all parameters of the whole model, over all pipeline stages and experts.

    Args:
        model: Options.
        topology: Options.
        vocab_size: Padded vocabulary.
        options: How fused weights are split into matrices.

    Returns:
        Specs in model order.
    """
    config = _transformer_namespace(model)
    return [_spec(weight, config, topology, options) for weight in _weights(model, vocab_size)]


def stage_specs(specs: list[ParamSpec], model: Model, topology: Topology, *, stage: int, ep: int) -> list[ParamSpec]:
    """What one pipeline stage and expert-parallel rank holds.

    Args:
        specs: From :func:`gpt_specs`.
        model: Options.
        topology: Options.
        stage: Pipeline stage.
        ep: Place among the expert-parallel ranks.

    Returns:
        The specs that live there.
    """
    per_stage = model.num_layers // topology.pp
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    per_rank = (model.moe.num_experts if model.moe else 0) // topology.ep
    experts = range(ep * per_rank, (ep + 1) * per_rank)
    return [spec for spec in specs if _lives_on(spec.name, layers, experts, stage, topology.pp)]


def _lives_on(name: str, layers: range, experts: range, stage: int, stages: int) -> bool:
    pieces = name.split(".")
    if "layers" in pieces and int(pieces[pieces.index("layers") + 1]) not in layers:
        return False
    if "local_experts" in pieces:
        return int(pieces[pieces.index("local_experts") + 1]) in experts
    if name.startswith("embedding."):
        return stage == 0
    if name.startswith(("output_layer.", "decoder.final")):
        return stage == stages - 1
    return True


def _transformer_namespace(model: Model) -> SimpleNamespace:
    values = dict(
        gated_linear_unit=True,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.hidden_size // model.num_attention_heads,
        attention_output_gate=False,
    )
    if model.mla is not None:
        values |= {name: getattr(model.mla, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim")}
        values |= {name: getattr(model.mla, name) for name in ("qk_pos_emb_head_dim", "v_head_dim")}
    return SimpleNamespace(**values)


def _weights(model: Model, vocab_size: int) -> Iterator[_Weight]:
    hidden = model.hidden_size
    yield _Weight("embedding.word_embeddings.weight", (vocab_size, hidden), 0)
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}"
        yield _Weight(f"{prefix}.input_layernorm.weight", (hidden,))
        attention = _latent_attention(model) if model.mla else _attention(model)
        for weight in attention:
            yield _Weight(f"{prefix}.self_attention.{weight.name}", weight.shape, weight.cut)
        yield _Weight(f"{prefix}.pre_mlp_layernorm.weight", (hidden,))
        has_experts = model.moe is not None and layer >= model.moe.first_dense_layers
        for weight in _experts(model) if has_experts else _mlp("", model.ffn_hidden_size, hidden):
            yield _Weight(f"{prefix}.mlp.{weight.name}", weight.shape, weight.cut, weight.is_routed)
    yield _Weight("decoder.final_layernorm.weight", (hidden,))
    if not model.tie_embeddings:
        yield _Weight("output_layer.weight", (vocab_size, hidden), 0)


def _attention(model: Model) -> Iterator[_Weight]:
    hidden, size = model.hidden_size, model.hidden_size // model.num_attention_heads
    rows = (model.num_attention_heads + 2 * model.num_query_groups) * size
    yield _Weight("linear_proj.weight", (hidden, model.num_attention_heads * size), 1)
    yield _Weight("linear_qkv.weight", (rows, hidden), 0)
    if model.qk_layernorm:
        yield _Weight("q_layernorm.weight", (size,))
        yield _Weight("k_layernorm.weight", (size,))


def _latent_attention(model: Model) -> Iterator[_Weight]:
    mla, heads, hidden = model.mla, model.num_attention_heads, model.hidden_size
    assert mla is not None
    q_rows = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    yield _Weight("linear_proj.weight", (hidden, heads * mla.v_head_dim), 1)
    if mla.q_lora_rank is None:
        yield _Weight("linear_q_proj.weight", (q_rows, hidden), 0)
    else:
        yield _Weight("linear_q_down_proj.weight", (mla.q_lora_rank, hidden), 0)
        yield _Weight("linear_q_up_proj.weight", (q_rows, mla.q_lora_rank), 0)
    yield _Weight("linear_kv_down_proj.weight", (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, hidden), 0)
    yield _Weight("linear_kv_up_proj.weight", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank), 0)
    if model.qk_layernorm:
        if mla.q_lora_rank is not None:
            yield _Weight("q_layernorm.weight", (mla.q_lora_rank,))
        yield _Weight("kv_layernorm.weight", (mla.kv_lora_rank,))


def _mlp(prefix: str, ffn: int, hidden: int, *, is_routed: bool = False) -> Iterator[_Weight]:
    yield _Weight(f"{prefix}linear_fc1.weight", (2 * ffn, hidden), 0, is_routed)
    yield _Weight(f"{prefix}linear_fc2.weight", (hidden, ffn), 1, is_routed)


def _experts(model: Model) -> Iterator[_Weight]:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    yield _Weight("router.weight", (moe.num_experts, hidden))
    for expert in range(moe.num_experts):
        yield from _mlp(f"experts.local_experts.{expert}.", moe.ffn_hidden_size, hidden, is_routed=True)
    if moe.shared_ffn_hidden_size is not None:
        yield from _mlp("shared_experts.", moe.shared_ffn_hidden_size, hidden)


def _spec(weight: _Weight, config: SimpleNamespace, topology: Topology, options: HpMuon) -> ParamSpec:
    role = megatron_role(weight.name, weight.shape)
    axis, size = ("etp", topology.etp) if weight.is_routed else ("tp", topology.tp)
    split = None
    if weight.cut != _REPLICATED and size > 1:
        split = AxisSplit(axis, size, *tensor_parallel_cut(role, weight.shape, weight.cut, is_gated=True))
    return ParamSpec(
        weight.name,
        role,
        weight.shape,
        view=matrix_view(weight.name, config, role, weight.shape, options),
        split=split,
        is_expert=weight.is_routed and (topology.ep > 1 or topology.etp != topology.tp),
    )
