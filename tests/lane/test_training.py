"""The trainer end to end on forked ranks: real text, learning, evaluation, logs, every platform option."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import RankError, run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Data, Logger, LrSchedule, Model, Run, Topology, Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import dense, moe, start, train_config


def config(folder: Path, model: Model, topology: Topology, *, optimizer: Any = None, **changes: Any) -> Train:
    train = train_config(model, topology, optimizer=optimizer or HpMuon(lr=0.02))
    run = Run(steps=30, micro_batch_size=2, global_batch_size=8, eval_interval=15, eval_batches=2, seed=1)
    train.run, train.lr_schedule = run, LrSchedule(warmup_steps=3)
    train.data = Data(cache_dir=str(folder / "data"))
    train.logger = Logger(jsonl=True, tensorboard=True)
    for path, value in changes.items():
        group, name = path.split("__")
        setattr(getattr(train, group), name, value)
    return train


def _train(launch: Launch, train: Train, folder: str) -> Any:
    from hp_muon_plugin.train.metrics import MetricLog
    from hp_muon_plugin.train.progress import Silent
    from hp_muon_plugin.train.worker import train_here

    platform = start(launch, train)
    log = MetricLog(train.logger, Path(folder), name="test", run_config={}) if launch.rank == 0 else None
    result = train_here(train, platform, log, Silent())
    if log is not None:
        log.close()
    return result.losses, result.held_out, result.num_skipped  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "ranks", "topology", "optimizer", "precision"),
    [
        (moe(), 2, Topology(ep=2), None, Precision.fp32),
        pytest.param(moe(), 2, Topology(), None, Precision.bf16, marks=pytest.mark.once),
        pytest.param(dense(), 2, Topology(pp=2), None, Precision.fp32, marks=pytest.mark.once),
        (dense(), 2, Topology(tp=2, sequence_parallel=True), None, Precision.bf16),
        pytest.param(moe(), 2, Topology(ep=2), AdamW(lr=3e-3), Precision.fp32, marks=pytest.mark.once),
    ],
    ids=["moe-ep2", "moe-dp2-bf16", "dense-pp2", "dense-tp2sp-bf16", "moe-ep2-adamw"],
)
def test_loss_falls_on_real_text(
    model: Model, ranks: int, topology: Topology, optimizer: Any, precision: Precision, tmp_path: Path
) -> None:
    train = config(tmp_path, model, topology, optimizer=optimizer, platform__precision=precision)
    results = run_ranks(ranks, _train, train, str(tmp_path / "run"))
    losses, held_out, skipped = results[0]
    assert all(result == results[0] for result in results)
    assert skipped == 0
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    assert set(held_out) == {15, 30}
    assert held_out[30] < held_out[15] < losses[0]
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss/train" in entry]
    assert [entry["loss/train"] for entry in steps] == losses
    assert {"grad_norm", "optim/step_ms", "throughput/tokens_per_s", "memory/rank0_mib", "lr/adamw"} <= steps[0].keys()
    evaluated = [entry for entry in entries if "loss/held_out" in entry]
    assert [entry["loss/held_out"] for entry in evaluated] == [held_out[15], held_out[30]]
    assert 2.5 < evaluated[0]["loss/unigram_entropy"] < 4.0
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def _with_a_nan(launch: Launch, train: Train, folder: str) -> Any:
    """The third backward pass leaves a NaN in a gradient."""
    import contextlib
    import io
    import logging

    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.metrics import MetricLog
    from hp_muon_plugin.train.progress import Lines
    from hp_muon_plugin.train.worker import train_here

    passes, run = [0], Trainer._forward_backward

    def spoilt(self: Trainer, *arguments: Any, forward_only: bool) -> Any:
        loss = run(self, *arguments, forward_only=forward_only)
        passes[0] += not forward_only
        if passes[0] == 3:  # on every rank, as the sum over ranks leaves it
            weight = next(p for p in self._model.parameters() if p.dim() > 1)
            weight.main_grad.view(-1)[0] = float("nan")
        return loss

    Trainer._forward_backward = spoilt  # type: ignore[method-assign]
    platform, told = start(launch, train), io.StringIO()
    logging.getLogger("hp_muon_plugin").addHandler(logging.StreamHandler(told))
    log = MetricLog(train.logger, Path(folder), name="test", run_config={}) if launch.rank == 0 else None
    with contextlib.redirect_stderr(told):
        result = train_here(train, platform, log, Lines(train.run.steps, told))
    if log is not None:
        log.close()
    return result.num_skipped, told.getvalue()


def test_a_step_that_is_left_out_is_told_and_logged(tmp_path: Path) -> None:
    train = config(tmp_path, dense(num_layers=1), Topology(), run__steps=4, run__eval_interval=4, run__log_interval=100)
    for skipped, told in run_ranks(2, _with_a_nan, train, str(tmp_path / "run")):
        assert skipped == 1
        assert [line.split()[1].strip(":/") for line in told.splitlines() if "SKIPPED" in line] == ["3/4"]
        assert told.count("NaN or infinite gradient in ") == 1
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["skipped"] for entry in entries if "skipped" in entry] == [0, 0, 1, 0]


@pytest.mark.once
def test_samples_of_a_step_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    losses = {}
    for ranks in (1, 2, 4):
        train = config(tmp_path, dense(), Topology(), run__canonical_init=True, run__steps=5, run__eval_interval=5)
        losses[ranks] = run_ranks(ranks, _train, train, str(tmp_path / f"run{ranks}"))[0]
    for ranks in (2, 4):
        torch.testing.assert_close(torch.tensor(losses[ranks][0]), torch.tensor(losses[1][0]), rtol=1e-5, atol=1e-5)
        assert losses[ranks][1][5] == pytest.approx(losses[1][1][5], rel=1e-5)


@pytest.mark.once
def test_a_run_repeats_itself_bit_for_bit(tmp_path: Path) -> None:
    train = config(tmp_path, moe(), Topology(ep=2), run__steps=6)
    first = run_ranks(2, _train, train, str(tmp_path / "a"))
    assert run_ranks(2, _train, train, str(tmp_path / "b")) == first


def test_experts_of_different_ranks_start_different(tmp_path: Path) -> None:
    """With megatron-core's own CPU initialisation every expert-parallel rank draws the same experts."""
    first, second = run_ranks(2, _first_expert)
    assert first[0] != second[0]
    assert first[1] == second[1]


def _first_expert(launch: Launch) -> Any:
    from hp_muon_plugin.train import setup

    config_ = train_config(moe(), Topology(ep=2))
    config_.run.canonical_init = False
    model, _ = setup.build_model(config_, 120, start(launch, config_))
    layer = model.module.decoder.layers[0]
    return layer.mlp.experts.local_experts[0].linear_fc1.weight.sum().item(), layer.mlp.router.weight.sum().item()


def test_too_little_held_out_text_is_an_error_with_the_fix(tmp_path: Path) -> None:
    train = config(tmp_path, dense(seq_length=4096), Topology(), data__split="99.9999,0.0001,0")
    with pytest.raises(RankError) as caught:
        run_ranks(1, _train, train, str(tmp_path / "run"))
    assert "ConfigError: data.split=99.9999,0.0001,0" in str(caught.value)


def test_layouts_that_this_megatron_gets_wrong_are_refused() -> None:
    from hp_muon_plugin.megatron.lane_checks import check_lane

    wrong = train_config(moe(), Topology(tp=2, sequence_parallel=True))
    groups = train_config(dense(num_query_groups=1), Topology(tp=2))
    if core_version().lane >= (0, 19):
        check_lane(wrong)
        check_lane(groups)
        return
    with pytest.raises(ConfigError, match="experts would drift apart"):
        check_lane(wrong)
    if core_version().lane < (0, 16):
        with pytest.raises(ConfigError, match="cannot split a query group"):
            check_lane(groups)
