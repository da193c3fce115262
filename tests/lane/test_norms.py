"""Gradient norms, clipping and zeros of whole models, on every parallel layout."""

import math
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import ClipMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, mla, moe, train, train_config, whole_tensors


def _norms(launch: Launch, model: Model, topology: Topology) -> Any:
    options = HpMuon(clip_grad=0.0, lr=1e-3)
    ready = build(launch, train_config(model, topology, optimizer=options))
    train(ready, 1)
    grads = whole_tensors(ready, lambda param: param.main_grad)
    last = ready.optimizer.grad_norms_last
    return last.total, last.muon, last.adamw, grads, ready.optimizer.count_zeros()


@pytest.mark.parametrize(
    ("model", "ranks", "topology"),
    [
        (dense(), 2, Topology(tp=2)),
        (dense(tie_embeddings=True), 2, Topology(pp=2)),
        (moe(), 2, Topology(ep=2)),
        (moe(), 4, Topology(ep=2)),
        (moe(), 4, Topology(tp=2, ep=2, sequence_parallel=True)),
        (moe(), 4, Topology(pp=2, ep=2)),
        (mla(), 2, Topology(ep=2)),
    ],
    ids=["tp2", "tied-pp2", "ep2", "ep2-edp2", "tp2-ep2", "pp2-ep2", "mla-ep2"],
)
def test_every_gradient_is_counted_once_in_the_norm(model: Model, ranks: int, topology: Topology) -> None:
    """Megatron #5916, #6099: counted once per replica, per instance or per expert."""
    for total, muon, adamw, grads, zeros in run_ranks(ranks, _norms, model, topology):
        wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        assert total == pytest.approx(wanted, rel=1e-5)
        assert muon**2 + adamw**2 == pytest.approx(total**2, rel=1e-5)
        assert zeros == sum(int((grad == 0).sum()) for grad in grads.values())


def _clipped(launch: Launch, mode: ClipMode) -> Any:
    options = HpMuon(clip_grad=0.01, clip_mode=mode)
    ready = build(launch, train_config(dense(), optimizer=options))
    seen: dict[str, float] = {}
    inner = ready.optimizer.optimizer
    update = inner.update

    def watching() -> None:
        for group in inner.param_groups:
            for param in group["params"]:
                seen[group["algorithm"]] = seen.get(group["algorithm"], 0.0) + float(param.grad.double().square().sum())
        update()

    inner.update = watching
    train(ready, 1)
    last = ready.optimizer.grad_norms_last
    return {name: math.sqrt(value) for name, value in seen.items()}, last.total, last.muon, last.adamw


def test_clipping_by_choice() -> None:
    """Megatron #5394: should Muon's gradients be clipped? All, AdamW's only, or none; reported per group."""
    seen, total, muon, adamw = run_ranks(1, _clipped, ClipMode.all)[0]
    assert total == pytest.approx(math.hypot(muon, adamw))
    assert math.hypot(*seen.values()) == pytest.approx(0.01, rel=1e-3)
    seen, _, muon, _ = run_ranks(1, _clipped, ClipMode.adamw_only)[0]
    assert seen["muon"] == pytest.approx(muon, rel=1e-5)
    assert seen["adamw"] == pytest.approx(0.01, rel=1e-3)
    seen, _, muon, adamw = run_ranks(1, _clipped, ClipMode.none)[0]
    assert seen == pytest.approx({"muon": muon, "adamw": adamw}, rel=1e-5)
