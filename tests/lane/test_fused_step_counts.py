"""What Megatron saved with a fused Adam trains on after a conversion: its count is where that Adam looks for it."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.fused_adam import FusedAdam, StrictFusedAdam, TensorStepAdam
from lane.upstream_runs import Load, Run

BODY: dict[str, Any] = {
    **{"arch": "dense", "ep": 1, "bf16": True, "tied": False, "bucket_size": None, "optimizer": "adam"},
    **{"layer_wise": False, "iteration": 3},
    "scheduler": {
        **{"max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 8, "lr_decay_steps": 80, "lr_decay_style": "cosine"},
        **{"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 20},
    },
}
ARGS = {
    **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "bf16": True, "vocab_size": 125},
    **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1},
}


def _save(run: Run, folder: Path) -> None:
    """As ``save_checkpoint`` with ``--ckpt-format torch``, on one rank."""
    there = folder / "iter_0000003" / "mp_rank_00"
    there.mkdir(parents=True)
    saved = {
        **{"args": argparse.Namespace(**ARGS), "checkpoint_version": 3.0, "iteration": 3},
        "model": run.model.state_dict_for_save_checkpoint(),
        "optimizer": run.optimizer.state_dict(),
        "opt_param_scheduler": run.schedule.state_dict(),
    }
    torch.save(saved, there / "model_optim_rng.pt")
    if run.body["distributed_optimizer"]:
        run.optimizer.save_parameter_state(str(there / "distrib_optim.pt"))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")


def _converted(source: Path, to: str, folder: Path, sharding: str | None = None) -> Path:
    found = convert.plan(open_checkpoint(source), to, Target(sharding=sharding, megatron=core_version().lane))
    assert all("random state" in line for line in found.losses)  # none was saved
    convert.convert(found, folder, drop=True)
    return folder


def _trained_on(launch: Launch, folder: str, adam: type[FusedAdam], distributed: bool) -> Any:
    run = Run(launch, {**BODY, "distributed_optimizer": distributed}, adam=adam)
    for number in range(3):
        run.step(number)
    saved = Path(folder) / "saved"
    _save(run, saved)
    expected = _two_more(run)
    ours = _converted(_converted(saved, "fsdp2", Path(folder) / "fsdp2"), "hp", Path(folder) / "hp")
    back = _converted(ours, "torch", Path(folder) / "back", "distributed" if distributed else "plain")
    loads = [Load(back, is_legacy=True, random=False)]
    if not distributed or core_version().lane >= (0, 14):
        sharding = "fully_reshardable" if distributed else "none"
        shards = _converted(ours, "torch_dist", Path(folder) / "shards", sharding)
        loads.append(Load(shards, is_legacy=False, random=False))
    found = []
    for load in loads:
        run.load(load)
        found.append(_two_more(run) == expected)
    return found


def _two_more(run: Run) -> list[Any]:
    losses = [run.step(number) for number in (3, 4)]
    return [losses, run.weights(), [_plain(item) for item in run.state()]]


def _plain(value: Any) -> Any:
    """Values of groups with the count as a number."""
    if isinstance(value, dict) and "step" in value:
        return {**value, "step": int(value["step"]) if not isinstance(value["step"], str) else value["step"]}
    return value


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("adam", [StrictFusedAdam, TensorStepAdam])
def test_trains_on_with_its_own_count(adam: type[FusedAdam], distributed: bool, tmp_path: Path) -> None:
    if adam is TensorStepAdam and distributed and core_version().lane >= (0, 14):
        pytest.skip("since 0.14 DistributedOptimizer itself saves an int, which an Adam with tensors does not take")
    (equal,) = run_ranks(1, _trained_on, str(tmp_path), adam, distributed)
    assert all(equal)
