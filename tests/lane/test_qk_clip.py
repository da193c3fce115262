"""QK-clip on real attention layers: logits of the same input before and after, on every layout and precision."""

import math
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import MLA, Model, Topology
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, build, dense, moe, train, train_config, whole_weights


def one_layer(**changes: Any) -> Model:
    return dense(num_layers=1, **changes)


def latent(q_lora_rank: int | None) -> Model:
    shape = MLA(q_lora_rank=q_lora_rank, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
    return one_layer(mla=shape)


def run(launch: Launch, model: Model, topology: Topology, dp: Any, precision: Precision, threshold: float) -> Any:
    """One step that moves nothing but what is clipped; logits by head and all weights, before and after."""
    options = HpMuon(qk_clip=threshold, weight_decay=0.1)
    ready = build(launch, train_config(model, topology, dp=dp, optimizer=options, precision=precision))
    _stand_still(ready)
    before = {name: weight.clone() for name, weight in whole_weights(ready).items()}
    train(ready, 1)
    first = ready.optimizer.qk_clip.largest_last.clone()
    after = whole_weights(ready)
    mains = _mains(ready)
    state = ready.optimizer.optimizer.state
    momenta = [entry["momentum_buffer"].norm() for entry in state.values() if "momentum_buffer" in entry]
    _stand_still(ready)
    train(ready, 1)  # the stream starts anew: the same samples
    return first, ready.optimizer.qk_clip.largest_last, before, after, mains, momenta


def _stand_still(ready: Ready) -> None:
    for group in ready.optimizer.param_groups:
        group["lr"] = 0.0


def _mains(ready: Ready) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(pair.main.detach().clone(), pair.model.detach().clone()) for pair, _ in ready.optimizer.parts]


DDP = None
FSDP = HpFsdp()
SP = Topology(tp=2, sequence_parallel=True)
GROUPED, SINGLE = one_layer(), one_layer(num_query_groups=4)
CASES = {
    "grouped": (GROUPED, 1, Topology(), DDP),
    "single": (SINGLE, 1, Topology(), DDP),
    "latent": (latent(16), 1, Topology(), DDP),
    "latent-plain-q": (latent(None), 1, Topology(), DDP),
    "data-parallel": (GROUPED, 2, Topology(), DDP),
    "tensor-parallel": (SINGLE, 2, SP, DDP),
    "shards": (GROUPED, 4, Topology(), FSDP),
    "shards-of-latent": (latent(16), 2, Topology(), FSDP),
    "replicas": (SINGLE, 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.shard)),
    "replicas-broadcast": (GROUPED, 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.broadcast)),
    "shards-and-tensor-parallel": (SINGLE, 4, SP, FSDP),
}


def _all_heads(results: list[Any], place: int, topology: Topology) -> torch.Tensor:
    """Heads of all tensor-parallel ranks; data-parallel ranks agree bit for bit."""
    found = [result[place] for result in results]
    for other in range(topology.tp, len(found)):
        assert torch.equal(found[other], found[other % topology.tp])
    return torch.cat(found[: topology.tp])


IN_EVERY_LANE = ("grouped", "latent", "tensor-parallel", "shards")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_LANE else pytest.param(name, marks=pytest.mark.once) for name in CASES]
)
def test_heads_above_the_threshold_end_at_it_and_others_do_not_change(name: str) -> None:
    model, ranks, topology, dp = CASES[name]
    unclipped = _all_heads(run_ranks(ranks, run, model, topology, dp, Precision.fp32, 1e6), 0, topology)
    assert len(unclipped) == 4
    threshold = float(unclipped.sort().values[1:3].mean())  # two heads above, two below
    results = run_ranks(ranks, run, model, topology, dp, Precision.fp32, threshold)
    first, second = _all_heads(results, 0, topology), _all_heads(results, 1, topology)
    torch.testing.assert_close(first, unclipped, rtol=1e-6, atol=0.0)
    above = first > threshold
    assert above.sum() == 2
    torch.testing.assert_close(
        second[above], torch.full((2,), threshold), rtol=3e-6, atol=0.0
    )  # a few roundings of float32
    assert torch.equal(second[~above], first[~above])
    _only_queries_and_keys_changed(results[0], above)


def _only_queries_and_keys_changed(result: Any, above: torch.Tensor) -> None:
    _, _, before, after, _, momenta = result
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    projections = ("linear_qkv.weight", "linear_q_up_proj.weight", "linear_q_proj.weight", "linear_kv_up_proj.weight")
    assert changed
    assert all(name.endswith(projections) for name in changed), changed
    assert all(torch.isfinite(norm) for norm in momenta)
    for name in changed:
        ratio = (after[name] / before[name]).nan_to_num(1.0)
        assert ratio.max() <= 1 + 1e-6
        rows = (ratio < 1 - 1e-6).any(dim=1)
        assert 0 < rows.sum() < len(rows)  # values and heads below the threshold are as they were
        assert torch.equal(after[name][~rows], before[name][~rows])


@pytest.mark.once
def test_the_factors_of_queries_and_keys() -> None:
    """The root for a key of one's own, the whole factor for queries with a shared key or rotary part."""
    for model, wanted in ((SINGLE, {"q": 0.5, "k": 0.5, "v": 0.0}), (GROUPED, {"q": 1.0, "k": 0.0, "v": 0.0})):
        _, _, before, after, *_ = run_ranks(1, run, model, Topology(), DDP, Precision.fp32, 1e-3)[0]
        largest = run_ranks(1, run, model, Topology(), DDP, Precision.fp32, 1e-3)[0][0]
        name = next(name for name in before if name.endswith("linear_qkv.weight"))
        per_group = 4 // model.num_query_groups
        old, new = (x[name].view(model.num_query_groups, per_group + 2, 8, -1) for x in (before, after))
        for group in range(model.num_query_groups):
            for head in range(per_group):
                factor = 1e-3 / float(largest[group * per_group + head])
                torch.testing.assert_close(new[group, head], old[group, head] * factor ** wanted["q"])
            torch.testing.assert_close(
                new[group, -2], old[group, -2] * (1e-3 / float(largest[group * per_group])) ** wanted["k"]
            )
            assert torch.equal(new[group, -1], old[group, -1])


def test_the_rotary_key_is_left_alone() -> None:
    largest, _, before, after, *_ = run_ranks(1, run, latent(16), Topology(), DDP, Precision.fp32, 1e-3)[0]
    prefix = "decoder.layers.0.self_attention."
    down = f"{prefix}linear_kv_down_proj.weight"
    assert torch.equal(before[down], after[down])
    q_old, q_new = (x[f"{prefix}linear_q_up_proj.weight"].view(4, 12, -1) for x in (before, after))
    k_old, k_new = (x[f"{prefix}linear_kv_up_proj.weight"].view(4, 16, -1) for x in (before, after))
    factor = (1e-3 / largest).view(4, 1, 1)
    torch.testing.assert_close(q_new[:, :8], q_old[:, :8] * factor.sqrt())
    torch.testing.assert_close(q_new[:, 8:], q_old[:, 8:] * factor)
    torch.testing.assert_close(k_new[:, :8], k_old[:, :8] * factor.sqrt())
    assert torch.equal(k_new[:, 8:], k_old[:, 8:])


@pytest.mark.parametrize("dp", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_masters_and_model_weights_are_scaled_alike(dp: Any) -> None:
    """Bug 60 of the peers: fp32 masters were not scaled, and brought the old weights back."""
    _, _, before, after, mains, _ = run_ranks(2, run, GROUPED, Topology(), dp, Precision.bf16, 1e-3)[0]
    for main, model in mains:
        assert main.dtype is torch.float32
        assert model.dtype is torch.bfloat16
        assert torch.equal(main.to(torch.bfloat16), model)
    if dp is DDP:
        name = next(name for name in before if name.endswith("linear_qkv.weight"))
        assert after[name].norm() < before[name].norm()


def _real_steps(launch: Launch, model: Model, topology: Topology, threshold: float) -> Any:
    options = HpMuon(lr=0.05, weight_decay=0.0, qk_clip=threshold)
    ready = build(launch, train_config(model, topology, optimizer=options, steps=12))
    largest = []
    for _ in range(12):
        train(ready, 1)
        largest.append(float(ready.optimizer.qk_clip.largest_last.max()))
    return largest, whole_weights(ready)


@pytest.mark.once
def test_layouts_agree_while_heads_are_clipped() -> None:
    """Several layers, experts, pipeline stages: 12 steps in which clipping bites end at the same weights."""
    model = moe()
    alone, weights = run_ranks(1, _real_steps, model, Topology(), 0.05)[0]
    assert max(alone) > 0.05  # it does bite
    for ranks, topology in (
        (2, Topology(pp=2)),
        (2, Topology(tp=2, etp=2, sequence_parallel=True)),
        (2, Topology(ep=2)),
    ):
        results = run_ranks(ranks, _real_steps, model, topology, 0.05)
        for name, wanted in weights.items():
            difference = (results[0][1][name] - wanted).norm() / wanted.norm()
            assert difference < 1e-5, (topology, name, difference)
        assert math.isclose(max(max(found) for found, _ in results), max(alone), rel_tol=1e-5)


@pytest.mark.once
def test_factors_of_odd_logits() -> None:
    """Bug 60 of the peers: a negative largest logit gave NaN. Infinite ones leave weights alone as well."""
    from hp_muon_plugin.megatron.qk_clip import clip_factors

    odd = torch.tensor([-1.0, 0.0, 50.0, 100.0, 200.0, math.inf, -math.inf, math.nan])
    assert clip_factors(odd, 100.0).tolist() == [1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0]
