"""megatron-core's distributed checkpoints of shards: bit for bit the same run, in whatever layout it goes on."""

import copy
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.fused_adam import FusedAdam, use_fused_adam
from lane.harness import Ready, build, moe, train, train_config, whole_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # Megatron's writer starts processes on four ranks, twice

_HSDP = HpFsdp(replicas=2, outer=OuterMode.shard)
_CUT_ROWS = HpFsdp(max_padding=0.0)


def _config(dp: HpFsdp | None, ep: int, *, precision: Precision = Precision.fp32, global_batch: int = 8) -> Any:
    topology, options = Topology(ep=ep), HpMuon(lr=5e-3, weight_decay=0.1)
    return train_config(moe(), topology, optimizer=options, precision=precision, dp=dp, global_batch=global_batch)


def _state(ready: Ready, is_loading: bool) -> dict[str, Any]:
    inner: Any = ready.model.module
    model = inner.sharded_state_dict()
    return {"model": model, "optimizer": ready.optimizer.sharded_state_dict({"model": model}, is_loading)}


def _save(ready: Ready, folder: str) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_state(ready, False), folder)


def _load(ready: Ready, folder: str) -> Ready:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(_state(ready, True), folder)
    ready.model.module.load_state_dict(loaded["model"])
    ready.optimizer.load_state_dict(loaded["optimizer"])
    return ready


def _num_cut_rows(ready: Ready) -> int:
    found = (parameter.sharded for _, parameter in ready.model.sharded())
    return sum(p.dim() == 1 and len(p.hp_shard.shape) > 1 and p.numel() > 0 for p in found)


def _resumed(launch: Launch, folder: str, config: Any, target: Any) -> Any:
    """Three steps, saved; two more straight, and two more in a new model that took them from the folder."""
    ready = train(build(launch, config), 3)
    schedule = copy.deepcopy(ready.schedule.state_dict())
    _save(ready, folder)
    at_save = whole_weights(ready)
    train(ready, 2)
    straight, num_cut = whole_weights(ready), _num_cut_rows(ready) if config.dp.name == "hp_fsdp" else 0
    other = _load(_rebuilt(target), folder)
    at_load = whole_weights(other)
    other.schedule.load_state_dict(schedule)
    train(other, 2)
    return straight, whole_weights(other), ready.losses[3:], other.losses, at_save, at_load, num_cut


def _rebuilt(config: Any) -> Ready:
    """A second model in the same job, whose weights a step has changed already."""
    from hp_muon_plugin.platform.base import choose
    from hp_muon_plugin.train import setup
    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.progress import Silent
    from lane.harness import VOCAB

    platform = choose("cpu")  # type: ignore[arg-type]
    model, _ = setup.build_model(config, VOCAB, platform)
    optimizer = setup.build_optimizer(config, model)
    schedule = setup.build_schedule(config, optimizer)
    parts = {"data": None, "platform": platform, "log": None, "display": Silent()}
    trainer = Trainer(config, model, optimizer, schedule, **parts)  # type: ignore[arg-type]
    ready = train(Ready(config, model, optimizer, schedule, trainer), 1)
    ready.losses.clear()
    ready.schedule.num_steps = 0
    return ready


@pytest.mark.parametrize(
    ("dp", "precision", "ranks"),
    [
        pytest.param(_CUT_ROWS, Precision.fp32, 3, id="rows-cut"),
        pytest.param(_HSDP, Precision.bf16, 4, id="hsdp-owners-bf16-ep2"),
    ],
)
def test_a_sharded_run_goes_on_bit_for_bit(dp: HpFsdp, precision: Precision, ranks: int, tmp_path: Any) -> None:
    config = _config(dp, 2 if ranks == 4 else 1, precision=precision, global_batch=2 * ranks)
    num_cut = 0
    for straight, resumed, losses, again, at_save, at_load, num in run_ranks(
        ranks, _resumed, str(tmp_path), config, config, timeout_s=200.0
    ):
        assert losses == again
        assert all(torch.equal(at_save[name], at_load[name]) for name in at_save)
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)
        num_cut += num
    assert num_cut > 0 or dp is not _CUT_ROWS  # some shard ends inside a row


@pytest.mark.parametrize("is_sharded_first", [True, False], ids=["to-ddp", "from-ddp"])
def test_a_checkpoint_moves_between_shards_and_megatrons_wrapper(is_sharded_first: bool, tmp_path: Any) -> None:
    if core_version().lane < (0, 14):
        pytest.skip("megatron-core 0.12 stores a range of a tensor and a whole tensor in different shapes")
    both = _config(_HSDP, 1), _config(None, 1)
    first, second = both if is_sharded_first else both[::-1]
    for straight, resumed, losses, again, at_save, at_load, _ in run_ranks(
        4, _resumed, str(tmp_path), first, second, timeout_s=200.0
    ):
        assert all(torch.equal(at_save[name], at_load[name]) for name in at_save)
        torch.testing.assert_close(losses, again, rtol=1e-6, atol=0)  # sums of gradients in another order
        for name in straight:
            torch.testing.assert_close(straight[name], resumed[name], rtol=1e-4, atol=1e-5)


def _adamw_resumed(launch: Launch, folder: str, first: Any, second: Any, is_fused: bool) -> Any:
    if is_fused:
        use_fused_adam(FusedAdam)
    return _resumed(launch, folder, first, second)


@pytest.mark.parametrize("is_fused", [False, True], ids=["torchs", "fused"])
@pytest.mark.parametrize("is_sharded_first", [True, False], ids=["to-megatrons", "from-megatrons"])
def test_adamw_moves_between_shards_and_megatrons_own(is_sharded_first: bool, is_fused: bool, tmp_path: Any) -> None:
    """Megatron found no group of ours, and a step count that a fused Adam keeps in groups was lost to us."""
    if core_version().lane < (0, 14):
        pytest.skip("megatron-core 0.12 stores a range of a tensor and a whole tensor in different shapes")
    both = [train_config(moe(), optimizer=AdamW(lr=3e-3), dp=dp) for dp in (HpFsdp(), None)]
    first, second = both if is_sharded_first else both[::-1]
    for straight, resumed, losses, again, at_save, at_load, _ in run_ranks(
        2, _adamw_resumed, str(tmp_path), first, second, is_fused, timeout_s=200.0
    ):
        assert all(torch.equal(at_save[name], at_load[name]) for name in at_save)
        torch.testing.assert_close(losses, again, rtol=1e-6, atol=0)  # products and sums in another order
        for name in straight:
            torch.testing.assert_close(straight[name], resumed[name], rtol=1e-4, atol=1e-5)
