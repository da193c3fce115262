"""Checkpoints of several tensor, pipeline and virtual ranks: who has which layer, and buckets that name nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.formats.flat_layout import bucket_size, buckets, laid
from hp_muon_plugin.checkpoint.formats.stages import stages
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import differences, unpacked

MOE = "mcore016_moe_ep2_dp2_dpr"
VIRTUAL, FIRST = "virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers"


@pytest.mark.parametrize(
    ("division", "expected"),
    [
        ({}, [["0 1 2 3"], ["4 5 6 7"]]),
        ({VIRTUAL: 2}, [["0 1", "4 5"], ["2 3", "6 7"]]),
        ({FIRST: 2}, [["0 1"], ["2 3 4 5 6 7"]]),
        ({"decoder_last_pipeline_num_layers": 2, VIRTUAL: 2}, [["0 1 2", "4 5 6"], ["3", "7"]]),
        ({"pipeline_model_parallel_layout": "Et*3|(tt|)*2,tL"}, [["0 1 2", "5 6"], ["3 4", "7"]]),
    ],
)
def test_stages_have_the_layers_that_megatron_gives_them(division: dict[str, Any], expected: list[list[str]]) -> None:
    found = stages(8, 2, division, predicts=False)
    assert [[" ".join(map(str, chunk.layers)) for chunk in row] for row in found] == expected
    flat = [chunk for row in found for chunk in row]
    assert [chunk.embeds for chunk in flat].index(True) == 0
    assert [chunk.ends for chunk in flat] == [chunk is flat[-1] for chunk in flat]
    assert [chunk.normalises for chunk in flat] == [chunk.ends for chunk in flat]


def test_stages_that_hold_the_embedding_and_the_loss_have_a_layer_less() -> None:
    counts = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    (first,), (last,) = stages(6, 2, counts, predicts=False)
    assert (first.layers, last.layers) == (range(3), range(3, 6))
    rows = stages(4, 4, {"pipeline_model_parallel_layout": "Ett|tt|m|L"}, predicts=True)
    assert [row[0].predicts for row in rows] == [False, False, True, False]
    assert [row[0].normalises for row in rows] == [False, True, False, False]  # with the last layer, not with the loss


@pytest.mark.parametrize(
    ("division", "message"),
    [
        ({VIRTUAL: 3}, "virtual_pipeline_model_parallel_size=3: the model has 8 layers, of which the stages have 4"),
        ({FIRST: 9}, "decoder_first_pipeline_num_layers=9: the model has 8 layers, of which -1 are left"),
        ({"account_for_loss_in_pipeline_split": True}, "pp=2: the model has 8 layers, which do not divide"),
        ({"pipeline_model_parallel_layout": "Ett|ttL"}, "which it does not divide among 2 stages"),
        ({"pipeline_model_parallel_layout": "Et*8|mL"}, "and no multi-token prediction"),
    ],
)
def test_divisions_that_do_not_fit_are_refused(division: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stages(8, 2, division, predicts=False)


def test_lengths_of_buckets_tell_the_size_at_which_they_were_closed() -> None:
    entries = [("a", 100, False), ("b", 64, False), ("c", 10, False)]
    for size in (None, 10, 70):
        slots, lengths = buckets(entries, size)
        assert laid(entries, lengths) == slots
        assert buckets(entries, bucket_size(entries, lengths))[1] == lengths
    assert buckets(entries, 70)[1] == [128, 100]
    assert laid(entries, [228, 1]) is laid(entries, [100, 128]) is None
    assert bucket_size(entries, [10, 218]) is None


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (Target(tp=2, pp=2, ep=2), {}),
        (Target(tp=2, ep=4), {"expert_tensor_parallel_size": "1", "bucket_size": "5000"}),
        (Target(pp=2), {"virtual_pipeline_model_parallel_size": "1", "bucket_size": "5000"}),
    ],
)
def test_buckets_of_a_mesh_come_back(target: Target, options: dict[str, str], tmp_path: Path) -> None:
    source = open_checkpoint(unpacked(MOE, tmp_path) / "ckpt")
    wanted = Target(target.tp, target.pp, target.ep, sharding="dp_reshardable", options=options)
    plan = convert.plan(source, "torch_dist", wanted)
    convert.convert(plan, tmp_path / "out", drop=bool(plan.losses))
    back = open_checkpoint(tmp_path / "out")
    assert not differences(source, back)
    assert back.state().steps == source.state().steps
    assert back.state().model["sharding"] == "dp_reshardable"
    args = back.state().args
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (target.tp, target.pp)
    keys = back.folder.tensors  # type: ignore[attr-defined]
    assert any(".bucket_idx_1." in key for key in keys) == ("bucket_size" in options)
    groups = {key.split("dp_group_idx_")[1].split(".")[0] for key in keys if key.startswith("chained_1.")}
    inside = int(options.get("expert_tensor_parallel_size", target.tp))
    assert len(groups) == (inside * target.pp * target.ep if target.ep > 1 else 0)


def test_sizes_of_another_run_are_refused(tmp_path: Path) -> None:
    """Buckets without the mesh that they are of hold nothing that can be told apart: never taken for something else."""
    source = open_checkpoint(unpacked(MOE, tmp_path) / "ckpt")
    plan = convert.plan(source, "torch_dist", Target(tp=2, ep=2, sharding="dp_reshardable"))
    convert.convert(plan, tmp_path / "out", drop=bool(plan.losses))
    file = tmp_path / "out" / "iter_0000003" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].tensor_model_parallel_size = 1
    torch.save(common, file)
    with pytest.raises(CheckpointError, match="is none of its parameters: its rounded master is not the stored weight"):
        open_checkpoint(tmp_path / "out")
    common["args"].tensor_model_parallel_size = 3
    torch.save(common, file)
    with pytest.raises(CheckpointError, match="its arguments name sizes that its model does not have"):
        open_checkpoint(tmp_path / "out")


def test_momentum_has_no_buckets(tmp_path: Path) -> None:
    source = open_checkpoint(unpacked("mcore019_muon_lwl_dense_dp2_dpr", tmp_path) / "ckpt")
    with pytest.raises(ConfigError, match="--sharding=dp_reshardable: not written for this optimizer"):
        convert.plan(source, "torch_dist", Target(sharding="dp_reshardable"))
