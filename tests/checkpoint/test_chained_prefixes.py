"""Megatron's loader decides by the content metadata whether keys of several optimizers begin with ``chained_``."""

from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, Momentum, RunState, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import written

MATRIX, VECTOR = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"


def _source() -> MadeUp:
    infos = {Key(MATRIX, "weight"): Info((8, 4), torch.float32), Key(VECTOR, "weight"): Info((4,), torch.float32)}
    infos[Key(MATRIX, "momentum_buffer")] = Info((8, 4), torch.float32)
    infos |= {Key(VECTOR, kind): Info((4,), torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
    hyper = {MATRIX: {"lr": 0.1, "momentum": 0.9}, VECTOR: {"lr": 0.1, "betas": (0.9, 0.95)}}
    return MadeUp(infos, RunState(iteration=3, hyper=hyper, steps={VECTOR: 3.0}, momentum=Momentum.average))


@pytest.mark.parametrize("sharding", ["none", "layer_wise", "layer_wise_fully_reshardable"])
def test_keys_are_as_the_metadata_tells(sharding: str, tmp_path: Path) -> None:
    written(_source(), "torch_dist", tmp_path / "out", Target(sharding=sharding)).close()
    metadata = torch.load(tmp_path / "out" / "common.pt", weights_only=False)["content_metadata"]
    kind = metadata.get("distrib_optim_sharding_type", "fully_reshardable")
    expected = kind != "fully_reshardable" or not metadata["chained_optim_avoid_prefix"]
    state = [key for key in DcpFolder(tmp_path / "out").tensors if "optimizer." in key]
    assert {key.startswith("chained_") for key in state} == {expected}
