"""Models without Transformer Engine: what megatron-core forgot there is repaired, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.local_fixes import apply_local_fixes, remove_local_fixes
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, batches, build, mla, moe, start, train_config, wrapped_model


def _without_cpu_fixes(launch: Launch, model: Model) -> Any:
    """Build as on a GPU, where nobody applies CPU fixes."""
    config = train_config(model)
    platform = start(launch, config)
    remove_local_fixes()
    wrapped, _ = setup.build_model(config, VOCAB, platform)
    batch = next(batches(config, 0, 1))
    loss = wrapped(batch.tokens, batch.position_ids, None, labels=batch.labels).mean()
    loss.backward()
    return float(loss), apply_local_fixes()


@pytest.mark.parametrize("model", [moe(), mla()], ids=["moe", "mla"])
def test_what_needs_transformer_engine_is_repaired_on_every_device(model: Model) -> None:
    """The router's NameError of 0.16 and MLA's TypeError were repaired with platform=cpu only."""
    loss, names = run_ranks(1, _without_cpu_fixes, model)[0]
    assert 4 < loss < 6
    assert "latent-attention-head-sizes" in names


def _router_gradients(launch: Launch, model: Model) -> list[float]:
    wrapped = wrapped_model(launch, train_config(model))
    batch = next(batches(train_config(model), 0, 1))
    wrapped(batch.tokens, batch.position_ids, None, labels=batch.labels).mean().backward()
    routers = [param for name, param in wrapped.named_parameters() if name.endswith("router.weight")]
    return [float(router.main_grad.norm()) for router in routers]


def test_one_expert_for_each_token_trains_its_router() -> None:
    """``model.moe.top_k=1`` ended in Megatron's words: "Please use --moe-router-pre-softmax when topk is 1."."""
    model = moe()
    assert model.moe is not None
    norms = run_ranks(1, _router_gradients, replace(model, moe=replace(model.moe, top_k=1, aux_loss_coeff=0.0)))[0]
    assert norms
    assert min(norms) > 0


def _attention(launch: Launch, v_head_dim: int) -> Any:
    """megatron-core's attention without Transformer Engine against torch's own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from hp_muon_plugin.models.gpt import transformer_config

    model = mla(v_head_dim=v_head_dim)
    start(launch, train_config(model))
    core = transformer_config(model, Topology(), Precision.fp32)
    layer = DotProductAttention(
        core, 1, AttnMaskType.causal, "self", softmax_scale=0.3, k_channels=12, v_channels=v_head_dim
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, 4, size) for size in (12, 12, v_head_dim))  # (seq, batch, heads, size)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    ours = layer(q, k, v, mask)
    heads = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3)
    return ours, wanted.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("v_head_dim", [4, 8, 12])
def test_latent_attention_takes_any_value_size(v_head_dim: int) -> None:
    """It took hidden_size / heads only: 'shape [16, 1, 32] is invalid for input of size 768'."""
    ours, wanted = run_ranks(1, _attention, v_head_dim)[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def _split_latent(launch: Launch, by: str) -> str:
    from hp_muon_plugin.megatron.build import build_megatron_optimizer
    from hp_muon_plugin.models import gpt
    from lane.harness import optimizer_config

    topology = Topology(tp=launch.world_size)
    if by != "our trainer":  # a trainer that builds its model by itself
        gpt.refuse_split_latent = lambda chunks: None
    dp = HpFsdp() if by == "foreign, sharded" else None
    try:
        model = wrapped_model(launch, train_config(mla(moe=None), topology, optimizer=AdamW(), dp=dp))
        build_megatron_optimizer(optimizer_config(), [model], settings=HpMuon())
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("by", ["our trainer", "foreign", "foreign, sharded"])
def test_latent_attention_over_tensor_parallel_ranks_is_refused(by: str) -> None:
    """Over shards somebody else's script trained on, with the wrong gradient."""
    for text in run_ranks(2, _split_latent, by):
        assert text.startswith("tensor_model_parallel_size=2: megatron-core's multi-latent attention splits linear_")
        assert "\n  fix: set it to 1" in text
    assert run_ranks(1, _split_latent, by) == ["not refused"]


def _rotary_gradient(launch: Launch) -> torch.Tensor:
    """Of the rows of the down projection that make the rotary key, whole."""
    from hp_muon_plugin.models import gpt
    from lane.harness import whole_tensors

    gpt.refuse_split_latent = lambda chunks: None
    import hp_muon_plugin.megatron.build as optimizer_build

    optimizer_build.refuse_split_latent = lambda chunks: None
    ready = build(launch, train_config(mla(moe=None), Topology(tp=launch.world_size)))
    ready.optimizer.step_with_ready_grads = lambda: True
    ready.trainer._step(batches(ready.config, ready.trainer._dp_rank, ready.trainer._dp_size))
    grads = whole_tensors(ready, lambda param: param.main_grad)  # type: ignore[attr-defined]
    return grads["decoder.layers.0.self_attention.linear_kv_down_proj.weight"][8:]


def test_megatron_still_computes_the_wrong_gradient_that_is_refused() -> None:
    """When this fails on every lane, the refusal can go. Rounding alone would be 1e-6."""
    whole, split = run_ranks(1, _rotary_gradient)[0], run_ranks(2, _rotary_gradient)[0]
    assert float((whole - split).norm() / whole.norm()) > 0.1
