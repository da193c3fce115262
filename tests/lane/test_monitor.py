"""Measurements against whole weights, on every layout; and what they cost a step that is not measured."""

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Model, Monitor, Topology, Train
from hp_muon_plugin.train.setup import Launch
from lane.harness import Ready, batches, build, dense, moe, specs_of, train_config, whole_weights
from lane.test_training import _train
from lane.test_training import config as run_config

STEPS = 3
SP = Topology(tp=2, sequence_parallel=True)


def config_of(
    model: Model, topology: Topology, dp: Any = None, *, monitor: Monitor | None = None, **more: Any
) -> Train:
    config = train_config(model, topology, dp=dp, steps=STEPS, **more)
    return replace(config, monitor=monitor or Monitor(interval=1, per_layer=False))


def run_steps(ready: Ready, steps: int) -> list[dict[str, float]]:
    trainer, found = ready.trainer, []
    stream = batches(ready.config, trainer._dp_rank, trainer._dp_size)
    for step in range(1, steps + 1):
        trainer._monitor.begin(step)
        ready.losses.append(trainer._step(stream)[0])
        found.append(trainer._measured)
    return found


def _run(launch: Launch, config: Train) -> Any:
    ready = build(launch, config)
    before = [run_steps(ready, 1)[0], {n: w.clone() for n, w in whole_weights(ready).items()}]
    lr = {group.get("algorithm", "adamw"): group["lr"] for group in ready.optimizer.param_groups}
    ready.trainer._monitor.begin(2)
    ready.trainer._step(batches(config, ready.trainer._dp_rank, ready.trainer._dp_size))
    roles = {spec.name: str(spec.role) for spec in specs_of(ready).values()}
    views = {spec.name: spec for spec in specs_of(ready).values()}
    weights = ready.trainer._monitor._instruments[0]
    return {
        "sizes": dict(zip(weights._kinds, weights._sizes, strict=True)),
        "first": before[0],
        "metrics": ready.trainer._measured,
        "before": before[1],
        "after": whole_weights(ready),
        "roles": roles,
        "specs": views,
        "lr": lr,
    }


LAYOUTS = {
    "alone": (moe(), 1, Topology(), None),
    "data-parallel": (moe(), 2, Topology(), None),
    "experts": (moe(), 2, Topology(ep=2), None),
    "stages": (dense(), 2, Topology(pp=2), None),
    "tied-stages": (dense(tie_embeddings=True), 2, Topology(pp=2), None),
    "tensor": (dense(), 2, SP, None),
    "tensor-without-sequence": (dense(), 2, Topology(tp=2), None),
    "shards": (dense(), 4, Topology(), HpFsdp()),
    "shards-of-experts": (moe(), 4, Topology(ep=2), HpFsdp()),
    "shards-tensor": (dense(), 4, SP, HpFsdp()),
    "replicas": (dense(), 4, Topology(), HpFsdp(replicas=2)),
    "replicas-shard": (moe(), 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.shard)),
    "replicas-broadcast": (dense(), 4, Topology(), HpFsdp(replicas=2, outer=OuterMode.broadcast)),
}


def _rms(tensors: list[torch.Tensor]) -> float:
    squares = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(squares / sum(t.numel() for t in tensors))


IN_EVERY_LANE = ("alone", "tensor", "shards-of-experts")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_LANE else pytest.param(name, marks=pytest.mark.once) for name in LAYOUTS]
)
def test_every_weight_and_output_is_counted_once(name: str) -> None:
    model, ranks, topology, dp = LAYOUTS[name]
    results = run_ranks(ranks, _run, config_of(model, topology, dp))
    got = results[0]["metrics"]
    for other in results:  # every rank holds the same figures
        assert {k: v for k, v in other["metrics"].items() if not k.startswith(("time", "share"))} == {
            k: v for k, v in got.items() if not k.startswith(("time", "share"))
        }
    roles = {name: role for result in results for name, role in result["roles"].items()}
    before, after = results[0]["before"], results[0]["after"]
    assert set(roles) == set(after)
    for role in set(roles.values()):
        names = [name for name in after if roles[name] == role]
        wanted = _rms([after[name] for name in names])
        assert got[f"rms/weight/{role}"] == pytest.approx(wanted, rel=1e-5)
        assert results[0]["sizes"][role] == sum(
            after[name].numel() for name in names
        )  # a copy would not show in an RMS
        moved = _rms([after[name] - before[name] for name in names])
        assert got[f"rms/update/{role}"] == pytest.approx(moved, rel=1e-4)
    _singular_values(results, got)
    outputs = [results[0]["first"][f"rms/output/layer{n:03d}"] for n in range(2)]
    assert outputs == pytest.approx(outputs_alone("moe" if model.moe else "tied" if model.tie_embeddings else "dense"))


def _singular_values(results: list[Any], got: dict[str, float]) -> None:
    from hp_muon_plugin.muon.scale import update_scale
    from hp_muon_plugin.train.weight_instruments import _first_matrix, _first_shape, _last_of_role

    first = results[0]
    specs = {name: spec for result in results for name, spec in result["specs"].items() if spec.view is not None}
    sample = _last_of_role(specs.values())
    checked = 0
    for role, spec in sample.items():
        if f"singular/max/{role}" not in got:
            assert role in ("embedding", "output", "router")
            continue
        _, rows, cols = _first_shape(spec)
        lr = first["lr"]["muon"]
        scale = lr * update_scale(HpMuon().scale, rows, cols)
        moved = first["before"][spec.name] * (1 - lr * 0.1) - first["after"][spec.name]
        values = torch.linalg.svdvals(_first_matrix(spec, moved.double() / scale))
        assert got[f"singular/max/{role}"] == pytest.approx(float(values.max()), rel=1e-3)
        assert got[f"singular/min/{role}"] == pytest.approx(float(values.min()), rel=1e-2, abs=1e-3)
        stable = float(values.square().sum() / values.max().square())
        assert got[f"singular/stable_rank/{role}"] == pytest.approx(stable, rel=1e-3)
        assert 0.3 < got[f"singular/max/{role}"] < 1.3  # keller's coefficients end at 1.20 at most
        checked += 1
    assert checked >= 4


def _outputs(launch: Launch, config: Train) -> list[float]:
    """RMS by another way: all outputs of the step kept, and taken together in float64."""
    ready = build(launch, config)
    kept: dict[int, list[torch.Tensor]] = {}
    for module in ready.model.modules():
        if type(module).__name__ == "TransformerLayer":
            module.register_forward_hook(lambda m, _, out: kept.setdefault(m.layer_number, []).append(out[0].detach()))
    got = run_steps(ready, 1)[0]
    wanted = [_rms(kept[layer]) for layer in sorted(kept)]
    assert [got[f"rms/output/layer{n:03d}"] for n in range(2)] == pytest.approx(wanted, rel=1e-6)
    return wanted


@lru_cache
def outputs_alone(model: str) -> list[float]:
    models = {"moe": moe(), "dense": dense(), "tied": dense(tie_embeddings=True)}
    return run_ranks(1, _outputs, config_of(models[model], Topology()))[0]


@pytest.mark.once
def test_metrics_reach_the_log_and_tensorboard(tmp_path: Path) -> None:
    config = run_config(tmp_path, moe(), Topology(ep=2), monitor__interval=10)
    run_ranks(2, _train, config, str(tmp_path / "run"))
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [entry for entry in entries if "rms/weight/expert_first" in entry]
    assert [entry["step"] for entry in measured] == [1, 10, 20, 30]
    names = {
        "rms/update/expert_first",
        "rms/output/layer001",
        "singular/max/expert_first",
        "share/newton_schulz_of_step",
    }
    assert names <= set(measured[0])
    assert all("loss/train" in entry for entry in measured)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = events.Scalars("rms/weight/expert_first")
    assert [point.step for point in points] == [1, 10, 20, 30]
    assert points[-1].value == pytest.approx(measured[-1]["rms/weight/expert_first"])


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_megatrons_own_adamw_is_measured_too(precision: Precision) -> None:
    config = config_of(dense(), SP, optimizer=AdamW(lr=3e-3), precision=precision)
    got = run_ranks(2, _run, config)[0]
    names = [name for name in got["after"] if got["roles"][name] == "mlp_second"]
    wanted = _rms([got["after"][name] for name in names])
    assert got["metrics"]["rms/weight/mlp_second"] == pytest.approx(wanted, rel=1e-5 if precision == "fp32" else 1e-3)
    assert got["metrics"]["rms/update/mlp_second"] > 0  # of the float32 masters
    assert not any(name.startswith("singular") for name in got["metrics"])


def _skipped(launch: Launch) -> Any:
    ready = build(launch, config_of(dense(), Topology()))
    with torch.no_grad():
        next(ready.model.parameters()).fill_(float("nan"))
    return run_steps(ready, 1)[0]


@pytest.mark.once
def test_a_skipped_step_has_no_update() -> None:
    metrics = run_ranks(1, _skipped)[0]
    assert "rms/weight/mlp_first" in metrics
    assert not any(name.startswith(("rms/update", "singular")) for name in metrics)


def _per_layer(launch: Launch) -> Any:
    ready = build(launch, config_of(dense(), Topology(pp=2), monitor=Monitor(interval=1, per_layer=True)))
    return run_steps(ready, 1)[0]


@pytest.mark.once
def test_layers_can_be_told_apart() -> None:
    for metrics in run_ranks(2, _per_layer):
        assert {"rms/weight/layer000/mlp_first", "rms/weight/layer001/mlp_first", "rms/weight/embedding"} <= set(
            metrics
        )


def _logits(launch: Launch) -> Any:
    config = config_of(dense(), Topology(pp=2), optimizer=HpMuon(qk_clip=1e-3))
    return run_steps(build(launch, config), 2)


@pytest.mark.once
def test_logits_are_logged_where_they_are_clipped() -> None:
    first, second = run_ranks(2, _logits)
    assert first[0]["attention/clipped_heads"] == 8  # four heads of each stage
    assert first[0]["attention/max_logit"] > 1e-3
    assert [m["attention/max_logit"] for m in first] == [m["attention/max_logit"] for m in second]
