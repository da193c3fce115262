"""Models that another library has cut into shards are refused before the first step, not in it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon import build_adamw, build_optimizer
from hp_muon_plugin.train.setup import Launch


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def _sharded(launch: Launch, by: str) -> Any:
    joined(launch)
    mesh = dist.device_mesh.init_device_mesh("cpu", (launch.world_size,))
    model: torch.nn.Module = _model()
    if by == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    elif by == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    messages = []
    for params in (model, list(model.named_parameters())):
        try:
            build_optimizer(params)
        except ConfigError as error:
            messages.append(str(error))
        else:
            assert params is model
            messages.append("built")
    if by == "fully_shard":
        baseline = build_adamw(model)
        model(torch.ones(4, 8)).sum().backward()
        baseline.step()
        assert baseline.grad_norm_last is not None
    return messages


@pytest.mark.parametrize("by", ["fully_shard", "tensor parallel"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dtensors_without_their_model_are_refused_and_the_baseline_takes_shards(by: str, ranks: int) -> None:
    for whole, named in run_ranks(ranks, _sharded, by):
        assert named.startswith("params=0.weight: is a DTensor (torch's fully_shard or tensor parallelism")
        assert "\n  fix: pass the model itself, sharded by hp_fully_shard or torch's fully_shard" in named
        # tensor parallelism cuts 0.weight between rows as fully_shard does, which Muon follows
        assert whole == "built"


def _flattened(launch: Launch, keeps_names: bool) -> str:
    joined(launch)
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_model(), use_orig_params=keeps_names, device_id=torch.device("cpu"))
    try:
        build_optimizer(model)
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("keeps_names", [True, False])
def test_flat_parameters_are_refused_by_name(keeps_names: bool) -> None:
    for text in run_ranks(2, _flattened, keeps_names):
        assert "is a flat parameter of torch's FullyShardedDataParallel" in text


def test_placeholders_are_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(0))
    param.ds_shape = torch.Size((8, 8))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="params=fc.weight: is a placeholder of DeepSpeed's ZeRO-3"):
        build_optimizer([("fc.weight", param)])
