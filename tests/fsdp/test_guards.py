"""torch's tools for plain tensors refuse shards: each of them gave wrong training or half a checkpoint in silence."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_ as imported_before

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.norms import clip_grad_norm_, grad_norm
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block, Language, loss, tokens


def _model(world_size: int, outer: str = "") -> nn.Module:
    torch.manual_seed(1)
    model = Language([Block(WIDTH) for _ in range(2)], is_tied=False)
    mesh = init_device_mesh("cpu", (2, world_size // 2) if outer else (world_size,))
    for layer in model.layers:
        hp_fully_shard(layer, mesh)
    return hp_fully_shard(model, mesh, **({"outer": outer} if outer else {}))


def _refusal(tries: Callable[[], Any]) -> str:
    try:
        tries()
    except ConfigError as error:
        return str(error)
    return ""


def _clipped(launch: Launch, outer: str) -> tuple[str, bool, float]:
    joined(launch)
    model = _model(launch.world_size, outer)
    loss(model, tokens(0, 0, launch.rank)).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    refusal = _refusal(lambda: imported_before(model.parameters(), 1e-3))
    is_kept = all(a is None or torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    clip_grad_norm_(model, 1e-3)
    return refusal, is_kept, float(grad_norm(model))


@pytest.mark.parametrize(("ranks", "outer"), [(2, ""), (2, "shard"), (4, "replicate")])
def test_clipping_by_the_norm_of_a_rank_is_refused(ranks: int, outer: str) -> None:
    """Each rank divided its shards by another norm. With ``outer=shard`` a replica has some gradients only."""
    for refusal, is_kept, norm in run_ranks(ranks, _clipped, outer):
        assert "fsdp.norms.clip_grad_norm_(model, max_norm)" in refusal
        assert is_kept
        assert norm == pytest.approx(1e-3, rel=1e-2)


def _clipped_as_torchtitan_does(launch: Launch, norm_type: float) -> tuple[str, float, float]:
    joined(launch)
    model = _model(launch.world_size)
    loss(model, tokens(0, 0, launch.rank)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = float(grad_norm(model, norm_type=norm_type))
    own = torch.nn.utils.get_total_norm(grads, norm_type)
    refusal = ""
    if math.isinf(norm_type):
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
    else:
        refusal = _refusal(lambda: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, own))
        dist.all_reduce(own.square_())
        own.sqrt_()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, own)
    return refusal, float(own) / whole, float(grad_norm(model, norm_type=norm_type))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_of_shards_clips_only_once_ranks_have_brought_it_together(norm_type: float) -> None:
    """torchtitan asks a DTensor for the whole norm, and takes what is none as it is: each rank's own factor."""
    for refusal, share, norm in run_ranks(2, _clipped_as_torchtitan_does, norm_type):
        assert math.isinf(norm_type) or "fsdp.norms.clip_grad_norm_(model, max_norm)" in refusal
        assert share == pytest.approx(1.0, rel=1e-5)
        assert norm == pytest.approx(1e-3, rel=1e-2)


def _replicated(launch: Launch) -> list[str]:
    joined(launch)
    model = _model(launch.world_size)
    refused = [
        _refusal(lambda: nn.parallel.DistributedDataParallel(model)),
        _refusal(lambda: grad_norm(model, norm_type=1.0)),
    ]
    mesh, other = init_device_mesh("cpu", (launch.world_size,)), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    refused.append(_refusal(lambda: fully_shard(model, mesh=mesh)))
    fully_shard(other[0], mesh=mesh)
    refused.append(_refusal(lambda: hp_fully_shard(other, mesh)))
    nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    return refused


def test_other_wrappers_of_shards_are_refused() -> None:
    """Shards of equal shapes became rank 0's on all ranks, others ended in a timeout, or gloo ended the process."""
    for wrapper, norm, over, under in run_ranks(2, _replicated):
        assert "is a shard of hp_fully_shard, which would be divided once more" in over
        assert under.startswith("module=0.weight: is a DTensor")
        assert "embedding.weight: is a shard of hp_fully_shard" in wrapper
        assert "norm_type=1.0: is neither 2 nor infinity" in norm


def _whole(launch: Launch, outer: str) -> float:
    joined(launch)
    model = _model(launch.world_size, outer)
    loss(model, tokens(0, 0, launch.rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return float(grad_norm(model))


@pytest.mark.parametrize(("ranks", "outer"), [(1, ""), (2, "replicate")])
def test_where_every_rank_holds_all_torch_clips_as_ever(ranks: int, outer: str) -> None:
    for norm in run_ranks(ranks, _whole, outer):
        assert norm == pytest.approx(1e-3, rel=1e-2)


def _other_model(launch: Launch) -> list[float]:
    joined(launch)
    sharded, plain = _model(launch.world_size), nn.Linear(3, 3)
    weights = copy.deepcopy(plain.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler.scale(plain(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(optimizer)
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    scaler.step(optimizer)
    moved = float((plain.weight - weights["weight"]).square().sum() + (plain.bias - weights["bias"]).square().sum())
    return [norm, math.sqrt(moved), float(next(sharded.parameters()).dim())]


def test_other_models_are_left_alone() -> None:
    for norm, moved, _ in run_ranks(2, _other_model):
        assert norm == pytest.approx(math.sqrt(12.0))  # 9 weights and 3 biases with gradient 1
        assert moved == pytest.approx(0.1, rel=1e-4)


def _scaled(launch: Launch) -> tuple[str, list[float], bool]:
    joined(launch)
    model = _model(launch.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(model, tokens(0, 0, launch.rank))).backward()
    refusal = _refusal(lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    sharded, scales, is_same = ShardedGradScaler("cpu", init_scale=4.0), [], True
    for step in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        sharded.scale(loss(model, tokens(step, 0, launch.rank))).backward()
        if step == 0 and launch.rank == 0:
            next(p for p in model.parameters() if p.numel()).grad.fill_(torch.inf)
        sharded.step(optimizer)
        sharded.update()
        scales.append(sharded.get_scale())
        is_equal = all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        is_same = is_same and is_equal == (step == 0)
        optimizer.zero_grad()
    return refusal, scales, is_same


def test_a_scaler_that_asks_no_other_rank_is_refused_and_torchs_sharded_one_works() -> None:
    """One rank left a step out that the other took, and their scales differed from then on."""
    for refusal, scales, is_same in run_ranks(2, _scaled):
        assert "ShardedGradScaler" in refusal
        assert scales == [2.0, 2.0]
        assert is_same


def _copies(model: nn.Module) -> list[dict[str, Any]]:
    """What lies elsewhere, as ``cpu_offload`` and hand-written copies make it."""
    return [
        get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)),
        {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()},
    ]


def _saved(launch: Launch, folder: Path) -> tuple[list[str], bool]:
    joined(launch)
    model = _model(launch.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model, tokens(0, 0, launch.rank)).backward()
    optimizer.step()
    refusals = []
    for number, state in enumerate((model.state_dict(), optimizer.state_dict())):
        saved = {"state": state}
        refusals.append(
            _refusal(lambda saved=saved, number=number: dcp.save(saved, checkpoint_id=folder / f"{number}"))
        )
        refusals.append(_refusal(lambda saved=saved: dcp.async_save(saved, checkpoint_id=folder / "async")))
    for number, copied in enumerate(_copies(model)):
        try:
            dcp.save({"state": {"model": copied}}, checkpoint_id=folder / f"copy{number}")
            refusals.append("")
        except (ConfigError, dcp.api.CheckpointException) as error:  # cpu_offload copies no tensor of the CPU
            refusals.append(str(error))
    whole_options = StateDictOptions(full_state_dict=True)
    refusals.append(_refusal(lambda: get_model_state_dict(model, options=whole_options)))
    refusals.append(_refusal(lambda: get_optimizer_state_dict(model, optimizer, options=whole_options)))
    whole = full_state_dict(model)
    dcp.save(whole, checkpoint_id=folder / "whole")
    found = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load(found, checkpoint_id=folder / "whole")
    return refusals, all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_distributed_checkpoint_of_one_ranks_shards_is_refused(tmp_path: Path) -> None:
    """It kept one rank's shards of weights and of optimizer state, and was written without a word."""
    for refusals, is_same in run_ranks(2, _saved, tmp_path):
        assert len(refusals) == 8
        assert all("whole.full_state_dict(model)" in refusal for refusal in refusals), refusals
        assert is_same
