"""HyperParallel's own checkpoints: archives that call themselves safetensors, even shards only."""

import re
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Key, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.safe_pickle import StandIn, load_metadata
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.others import fixture, fixtures, there_and_back, written, wrong

MUON = "hyper_parallel/muon_dense_fsdp_ws2"
ALL = fixtures("hyper_parallel/*", MUON)


def described(value: object) -> object:
    """Metadata as plain values."""
    if isinstance(value, StandIn):
        return value.class_name, {key: described(item) for key, item in vars(value).items() if key != "given"}
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(described(key)): described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return value


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("world", ["1", "4"])
def test_reads_every_tensor_and_writes_for_any_even_world(name: str, world: str, tmp_path: Path) -> None:
    folder = fixture(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    assert source.format == "hyper_parallel"
    assert wrong(source, folder) == []
    there = Target(options={"world": world})
    assert there_and_back(source, "hyper_parallel", tmp_path / "out", there=there) == []


def test_metadata_is_as_hyper_parallel_writes_it(tmp_path: Path) -> None:
    folder = fixture(MUON, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    written(source, "hyper_parallel", tmp_path / "out", Target(options={"world": "2"}))
    ours, theirs = (
        load_metadata((path / ".metadata").read_bytes(), "x") for path in (tmp_path / "out", folder / "ckpt")
    )
    assert ours.version == theirs.version
    for key, item in theirs.state_dict_metadata.items():
        assert described(ours.state_dict_metadata[key]) == described(item), key
    for rank in range(2):
        with open(tmp_path / "out" / f"_rank{rank}_.safetensors", "rb") as file:
            saved = torch.load(file, weights_only=True)  # torch's own reader takes it
        assert saved["model.embedding.word_embeddings.weight"].shape == (64, 32)


def test_worlds_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(MUON, tmp_path) / "ckpt")
    with pytest.raises(ConfigError, match=r"world=3: \S+ has \d+ rows, which do not divide"):
        written(source, "hyper_parallel", tmp_path / "a", Target(options={"world": "3"}))
    with pytest.raises(ConfigError, match="--option world=many: is no number above 0"):
        written(source, "hyper_parallel", tmp_path / "b", Target(options={"world": "many"}))


def test_the_mindspore_kind_of_file_is_real_safetensors(tmp_path: Path) -> None:
    """The first bytes decide, not the suffix: torch's load trusts the suffix and dies of "header too large"."""
    from safetensors.torch import save_file

    folder = fixture(MUON, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    written(source, "hyper_parallel", tmp_path / "out", Target(options={"world": "2"}))
    for path in (tmp_path / "out").glob("*.safetensors"):
        with open(path, "rb") as file:
            saved = torch.load(file, weights_only=True)
        save_file(saved, path)
    assert wrong(open_checkpoint(tmp_path / "out"), folder) == []


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = fixture(MUON, tmp_path / "in")
    written(open_checkpoint(folder / "ckpt"), "hyper_parallel", tmp_path / "out", Target(options={"world": "2"}))
    (tmp_path / "out" / "_rank1_.safetensors").unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "out" / "_rank1_.safetensors"))):
        open_checkpoint(tmp_path / "out")


def test_rows_are_those_of_the_ranks(tmp_path: Path) -> None:
    source = open_checkpoint(fixture(MUON, tmp_path) / "ckpt")
    key = Key("decoder.layers.0.mlp.linear_fc1.weight", "momentum_buffer")
    assert torch.equal(source.read(key, 40, 60), source.read(key)[40:60])  # across the border of two ranks
