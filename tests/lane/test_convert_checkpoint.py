"""What megatron-core saved, converted to ours and back, is loaded by megatron-core and trains on the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, moe, train, train_config


def _converted(launch: Launch, folder: str, optimizer: str, precision: Precision) -> Any:
    from megatron.core import dist_checkpointing

    config = train_config(
        moe(),
        Topology(ep=launch.world_size),
        precision=precision,
        optimizer=AdamW(lr=5e-3) if optimizer == "adamw" else None,
    )
    ready = train(build(launch, config), 3)
    inner = ready.model.module

    def state(is_loading: bool) -> dict[str, Any]:
        model_state = inner.sharded_state_dict()
        return {"model": model_state, "optimizer": ready.optimizer.sharded_state_dict(model_state, is_loading)}

    saved, ours, back = (Path(folder) / name for name in ("saved", "ours", "back"))
    if launch.rank == 0:
        saved.mkdir()
    dist.barrier()
    schedule = dict(ready.schedule.state_dict())
    dist_checkpointing.save(state(False), str(saved))
    train(ready, 2)
    straight = [param.detach().clone() for param in ready.model.parameters()]
    if launch.rank == 0:
        source = open_checkpoint(saved)
        convert.convert(convert.plan(source, "hp", Target()), ours)
        target = Target(ep=launch.world_size)
        convert.convert(convert.plan(open_checkpoint(ours), "torch_dist", target), back, drop=True)  # no random state
    dist.barrier()
    loaded = dist_checkpointing.load(state(True), str(back / "iter_0000000"))
    inner.load_state_dict(loaded["model"])
    ready.optimizer.load_state_dict(loaded["optimizer"])
    ready.schedule.num_steps = 0
    ready.schedule.load_state_dict(schedule)
    train(ready, 2)
    return all(torch.equal(a, b) for a, b in zip(straight, ready.model.parameters(), strict=True))


@pytest.mark.parametrize(("optimizer", "precision"), [("hp_muon", Precision.bf16), ("adamw", Precision.fp32)])
def test_training_goes_on_as_if_never_converted(optimizer: str, precision: Precision, tmp_path: Path) -> None:
    assert run_ranks(2, _converted, str(tmp_path), optimizer, precision) == [True, True]
