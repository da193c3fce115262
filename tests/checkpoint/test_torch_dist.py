"""Megatron's torch_dist: every optimizer form read to the bit, and written so that nothing changes."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint, writer
from hp_muon_plugin.checkpoint.verify import sampled_masters
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import CARRIED, CORRUPT, MadeUp, differences, digest, shared, truth, unpacked

SOUND = [name for name in (*CARRIED, *shared("mcore01*/*/ckpt/iter_*/metadata.json")) if name != CORRUPT]


def as_lists(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def changed_fields(a: RunState, b: RunState) -> set[str]:
    return {field.name for field in fields(RunState) if not same(getattr(a, field.name), getattr(b, field.name))}


@pytest.mark.parametrize("name", SOUND)
def test_every_tensor_and_the_run_state_are_the_live_ones(name: str, tmp_path: Path) -> None:
    fixture = unpacked(name, tmp_path)
    expected, body = truth(fixture)
    source = open_checkpoint(fixture / "ckpt")
    found = {key: digest(source.read(key)) for key in source.tensors()}
    if not body["bf16"]:  # the weight is its own master
        expected = {key: value for key, value in expected.items() if key.kind != Kind.main}
    assert found == expected
    state = source.state()
    assert (state.iteration, state.consumed_samples, state.vocab_size) == (
        body["iteration"],
        body["consumed_train_samples"],
        body["vocab_true"],
    )
    assert state.scheduler == body["scheduler"]
    assert as_lists(state.hyper) == body["param_group_of"]
    assert state.steps == {key: step for key, step in body["optimizer_step_of"].items() if step is not None}
    assert not list(sampled_masters(source))
    source.close()


@pytest.mark.parametrize("name", [name for name in CARRIED if name != CORRUPT])
def test_ours_and_back_changes_nothing(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(unpacked(name, tmp_path) / "ckpt")
    ep = 2 if source.state().model["experts_apart"] else 1
    convert.convert(convert.plan(source, "hp", Target()), tmp_path / "hp")
    ours = open_checkpoint(tmp_path / "hp")
    assert not differences(source, ours)
    assert not changed_fields(source.state(), ours.state())
    convert.convert(convert.plan(ours, "torch_dist", Target(ep=ep)), tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert not differences(source, back)
    assert changed_fields(source.state(), back.state()) <= {"model", "other"}  # another form of the optimizer


def test_masters_of_another_parameter_are_refused_by_name(tmp_path: Path) -> None:
    """megatron-core 0.15 to 0.19 shifts tensors between several buckets; 51 of 63 in this file."""
    source = open_checkpoint(unpacked(CORRUPT, tmp_path) / "ckpt")
    with pytest.raises(CheckpointError, match=r"is corrupt: \d+ float32 masters.*\n  main/embedding.word_embeddings"):
        convert.plan(source, "hp", Target())


def test_one_optimizer_without_expert_parallelism_two_with_it(tmp_path: Path) -> None:
    """EP 2 has two Adams, EP 1 one: upstream cannot go from one to the other."""
    from hp_muon_plugin.checkpoint import torch_archive
    from hp_muon_plugin.checkpoint.files import Files

    source = open_checkpoint(unpacked("mcore016_moe_ep2_dp2_dpr", tmp_path) / "ckpt")
    groups = {}
    for ep in (1, 2):
        folder = tmp_path / f"ep{ep}"
        folder.mkdir()
        writer("torch_dist").write(source, folder, Target(ep=ep), lambda nbytes: None, 2**20)
        optimizer = torch_archive.load(Files(folder), "common.pt")["optimizer"]
        items = [optimizer] if "optimizer" in optimizer else [optimizer[index] for index in sorted(optimizer)]
        groups[ep] = [[group["is_expert_parallel"] for group in item["optimizer"]["param_groups"]] for item in items]
        assert not differences(source, open_checkpoint(folder))
    assert groups == {1: [[False, False]], 2: [[False, False], [True]]}


def test_experts_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(unpacked("mcore016_moe_ep2_dp2_dpr", tmp_path) / "ckpt")
    with pytest.raises(ConfigError, match="4 experts cannot be shared out evenly"):
        convert.plan(source, "torch_dist", Target(ep=3))


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    source = open_checkpoint(unpacked("mcore012_moehet_ep2_dp2_fsms", tmp_path) / "ckpt")
    with pytest.raises(ConfigError, match="layers of this model differ"):
        convert.plan(source, "torch_dist", Target(options={"layers": "stacked"}))
    folder = tmp_path / "out"
    folder.mkdir()
    writer("torch_dist").write(source, folder, Target(ep=2), lambda nbytes: None, 2**20)
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in open_checkpoint(folder).folder.tensors  # type: ignore[attr-defined]


def test_transformer_engines_names_and_the_local_ones(tmp_path: Path) -> None:
    """The norm before experts stays a module with Transformer Engine; on dense layers both store it fused."""
    source = open_checkpoint(unpacked("mcore016_moe_ep2_dp2_dpr", tmp_path) / "ckpt")
    for spec, key in (
        ("te", "decoder.layers.pre_mlp_layernorm.weight"),
        ("local", "decoder.layers.mlp.linear_fc1.layer_norm_weight"),
    ):
        folder = tmp_path / spec
        folder.mkdir()
        writer("torch_dist").write(source, folder, Target(ep=2, options={"spec": spec}), lambda nbytes: None, 2**20)
        written = open_checkpoint(folder)
        assert key in written.folder.tensors  # type: ignore[attr-defined]
        assert not differences(source, written)


def test_an_embedding_without_padding_gets_what_megatron_wants(tmp_path: Path) -> None:
    """megatron-bridge#5353 padded twice; here the true size decides, and moments get the same rows."""
    rows = Info((125, 8), torch.float32)
    infos = {Key("embedding.word_embeddings.weight", kind): rows for kind in ("weight", "exp_avg", "exp_avg_sq")}
    source = MadeUp(infos, RunState(vocab_size=125, args={"make_vocab_size_divisible_by": 32}))
    found = convert.plan(source, "torch_dist", Target(tp=2))
    report = convert.convert(found, tmp_path / "out", drop=True)  # no random state
    written = open_checkpoint(tmp_path / "out")
    for key in infos:
        assert written.tensors()[key].shape == (128, 8)
        assert written.read(key)[:125].equal(source.read(key))
        assert not written.read(key)[125:].any()
        assert report.changed[str(key)] == "125 to 128 rows of vocabulary"
    convert.convert(convert.plan(written, "torch_dist", Target(tp=2)), tmp_path / "again", drop=True)
    assert not differences(written, open_checkpoint(tmp_path / "again"))
