"""Megatron's torch_dcp: optimizer state under numbers, which Megatron's own rules turn into names."""

from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.formats.group_members import Param, members
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.others import fixture, fixtures, there_and_back, wrong

BF16 = "mcore019_torch_dcp/dense_bf16"
ALL = fixtures("mcore019_torch_dcp/*", BF16)


@pytest.mark.parametrize("name", ALL)
def test_reads_every_tensor_and_numbers_them_alike(name: str, tmp_path: Path) -> None:
    folder = fixture(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    assert source.format == "torch_dcp"
    assert wrong(source, folder) == []
    assert there_and_back(source, "torch_dcp", tmp_path / "out") == []
    ours, theirs = DcpFolder(tmp_path / "out" / "there"), DcpFolder(next((folder / "ckpt").glob("iter_*")))
    assert set(theirs.objects) == set(ours.objects) - {"hp_muon"}
    assert [key for key in theirs.tensors if not torch.equal(theirs.read(key), ours.read(key))] == []


def test_bf16_weights_come_back_through_masters(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(BF16, tmp_path) / "ckpt")
    assert there_and_back(source, "fsdp2", tmp_path / "a") == []
    assert there_and_back(source, "hyper_parallel", tmp_path / "b") == []


def test_groups_that_could_both_have_a_parameter_are_refused() -> None:
    params = [Param("decoder.layers.0.mlp.linear_fc2.weight", (4, 4), False)]
    groups = [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 1.0, "lr": 0.2}]
    with pytest.raises(CheckpointError, match=r"parameter groups \[0, 1\] all fit decoder.layers.0.mlp.linear_fc2"):
        members(groups, params, {}, "x.pt")
    with pytest.raises(CheckpointError, match="no parameter group fits decoder.layers.0.mlp.linear_fc2.weight"):
        members([{"wd_mult": 0.0, "lr": 0.1}], params, {}, "x.pt")
    assert members([groups[0], groups[0]], params, {}, "x.pt") == [[params[0].name], []]


def test_rules_of_membership() -> None:
    """Biases and vectors without decay, experts of several ranks apart, Muon's matrices apart from embeddings."""
    params = [
        Param("embedding.word_embeddings.weight", (8, 4), False),
        Param("0/decoder.layers.0.self_attention.linear_qkv.weight", (8, 4), False),
        Param("0/decoder.layers.0.self_attention.linear_qkv.bias", (8,), False),
        Param("0/decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", (8, 4), True),
    ]
    muon = {"momentum": 0.9, "wd_mult": 1.0, "is_expert_parallel": False}
    adam = {"betas": (0.9, 0.95), "wd_mult": 1.0, "is_expert_parallel": False}
    groups = [muon, {**muon, "is_expert_parallel": True}, adam, {**adam, "wd_mult": 0.0}]
    assert members(groups, params, {}, "x.pt") == [
        [params[1].name],
        [params[3].name],
        [params[0].name],
        [params[2].name],
    ]
    normed = [Param("decoder.layers.0.self_attention.q_layernorm.weight", (8,), False)]
    assert members([adam], normed, {"apply_wd_to_qk_layernorm": True}, "x.pt") == [[normed[0].name]]
