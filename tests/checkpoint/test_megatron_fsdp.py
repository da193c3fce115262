"""Megatron-FSDP's fsdp_dtensor: halves of gated layers, two depths of prefixes, one object per parameter and value."""

from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Key, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.others import fixture, fixtures, there_and_back, written, wrong

HET = "megatron_fsdp019/moehet_ep2_dp2"
ALL = fixtures("megatron_fsdp019/*", HET)


@pytest.mark.parametrize("name", ALL)
def test_reads_every_tensor_and_writes_the_same_keys(name: str, tmp_path: Path) -> None:
    folder = fixture(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    assert source.format == "fsdp_dtensor"
    assert wrong(source, folder, weights_are_masters=True) == []
    assert (source.state().flops, source.state().vocab_size, source.state().consumed_samples) == (12345, 125, 12)
    assert there_and_back(source, "fsdp_dtensor", tmp_path / "out") == []
    theirs = DcpFolder(next((folder / "ckpt").glob("iter_*")))
    ours = DcpFolder(tmp_path / "out" / "there")
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert set(ours.objects) - {"hp_muon"} == set(theirs.objects)
    assert all(ours.planner_data[key] == path for key, path in theirs.planner_data.items())


def test_weights_are_the_rounded_masters(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    for key in source.tensors():
        if key.kind == "main":
            weight = source.read(Key(key.name, "weight"))
            assert weight.dtype == torch.bfloat16
            assert torch.equal(source.read(key).bfloat16(), weight)


@pytest.mark.parametrize("style", ["flat", "nested"])
def test_way_through_fsdp2_and_back(style: str, tmp_path: Path) -> None:
    """Reports 1 and 2: both directions, optimizer included; 15 and 16: experts by their global number."""
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    there = Target(options={"style": style, "experts": "stacked"})
    assert there_and_back(source, "fsdp2", tmp_path / "out", there=there) == []


def test_gate_and_up_are_cut_on_the_whole_tensor(tmp_path: Path) -> None:
    """Reports 3 and 5: the gate is the upper half of the whole layer, of its moments as of the weight."""
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    written(source, "fsdp_dtensor", tmp_path / "out")
    folder = DcpFolder(tmp_path / "out")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for kind, prefix, suffix in (
        ("main", "model.module.", ""),
        ("exp_avg", "optimizer.state.module.module.module.", ".exp_avg"),
    ):
        whole = source.read(Key(name, kind))
        half = whole.shape[0] // 2
        assert torch.equal(folder.read(f"{prefix}{name}_w{suffix}"), whole[:half])
        assert torch.equal(folder.read(f"{prefix}{name}_v{suffix}"), whole[half:])


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    writer = DcpWriter(tmp_path)
    writer.add("model.module.decoder.layers.0.mlp.linear_fc1.weight_w", torch.zeros(2, 2))
    writer.close()
    with pytest.raises(CheckpointError, match="linear_fc1.weight_w is there, but its other half is not"):
        open_checkpoint(tmp_path)


def test_masters_that_do_not_round_to_the_weights_are_refused(tmp_path: Path) -> None:
    """Report 6 is such a checkpoint. This format keeps masters only, so the weights would be others afterwards."""
    source = open_checkpoint(fixture(HET, tmp_path) / "ckpt")
    read = source.read

    def shifted(key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = read(key, start, stop)
        return found * 2 if key == Key("decoder.layers.1.self_attention.linear_qkv.weight", "main") else found

    source.read = shifted  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attention\.linear_qkv\.weight: \d+ of \d+ elements"):
        written(source, "fsdp_dtensor", tmp_path / "out")
    assert not (tmp_path / "out" / ".metadata").exists()
