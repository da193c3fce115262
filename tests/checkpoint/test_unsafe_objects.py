"""Objects inside of checkpoints that would run code or name files elsewhere, and files without checksums."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.safetensors_files import read_header
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.fixtures import rewritten
from tests.checkpoint.others import fixture, written
from tests.checkpoint.test_unsafe_files import Bomb


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["group", "extra_state", "scheduler"])
def test_code_in_objects_of_dcp_is_named_and_not_run(place: str, tmp_path: Path) -> None:
    bomb, weights = Bomb(tmp_path / "ran"), {"a": torch.zeros(2)}
    saved: dict[str, Any] = {
        "group": {"model": weights, "optim": {"state": {}, "param_groups": [{"lr": bomb, "params": ["a"]}]}},
        "extra_state": {"model": {**weights, "x._extra_state": bomb}},
        "scheduler": {"model": weights, "lr_scheduler": {"last_epoch": bomb}},
    }[place]
    dcp.save(saved, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    told = ""
    try:
        open_checkpoint(tmp_path / "ckpt").state()
    except CheckpointError as error:
        told = str(error)
    if place != "extra_state":  # which nobody reads
        assert "__0_0.distcp" in told
        assert "its pickle wants posix.mkdir" in told
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def hyper_parallel(tmp_path: Path) -> Path:
    convert(plan(gpt(1, hidden=16), "hyper_parallel", Target()), tmp_path / "hyper")
    return tmp_path / "hyper"


@pytest.mark.parametrize(
    "file", ["optim.param_groups_rank0.bytes", "lr_scheduler_rank0.bytes", "iteration_rank0.bytes", ".metadata"]
)
def test_code_in_objects_of_hyper_parallel_is_named_and_not_run(file: str, hyper_parallel: Path) -> None:
    bomb = hyper_parallel / "ran"
    (hyper_parallel / file).write_bytes(pickle.dumps(Bomb(bomb)))
    with pytest.raises(CheckpointError, match=rf"{file}: its pickle wants posix\.mkdir"):
        open_checkpoint(hyper_parallel)
    assert not bomb.exists()


def test_code_in_metadata_of_one_rank_is_named_and_not_run(hyper_parallel: Path) -> None:
    bomb = hyper_parallel / "ran"
    (hyper_parallel / ".metadata").rename(hyper_parallel / ".rank0_metadata")
    open_checkpoint(hyper_parallel).close()
    (hyper_parallel / ".rank0_metadata").write_bytes(pickle.dumps(Bomb(bomb)))
    with pytest.raises(CheckpointError, match=r"\.rank0_metadata: its pickle wants posix\.mkdir"):
        open_checkpoint(hyper_parallel)
    assert not bomb.exists()


def test_files_that_hyper_parallel_names_stay_in_the_folder(hyper_parallel: Path) -> None:
    rewritten(hyper_parallel / ".metadata", lambda raw: raw.replace(b"iteration_rank0.bytes", b"../../../../etc/group"))
    with pytest.raises(CheckpointError, match="which is not inside the folder"):
        open_checkpoint(hyper_parallel)


def test_a_flipped_bit_in_safetensors_is_found_by_the_hash_of_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The format has no checksum of its own; tensors that were cast or cut to the vocabulary had no hash either."""
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    target = Target(dtype=torch.float16, options={"vocab_size": "125"})
    for name, chosen in (("same", Target(options={"vocab_size": "125"})), ("cast", target)):
        convert(plan(source, "hf", chosen), tmp_path / name, drop=True)
        file = tmp_path / name / "model.safetensors"
        header = read_header(Files(file.parent), file.name)
        assert run(["verify", str(file.parent)]) == 0
        kept, at = file.read_bytes(), file.stat().st_size
        for key, tensor in reversed(header.items()):
            at -= tensor.nbytes
            file.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
            capsys.readouterr()
            assert run(["verify", str(file.parent)]) == 3, key
            assert "is not what was converted: its hash differs from conversion.json" in capsys.readouterr().out
        file.write_bytes(kept)
        assert run(["verify", str(file.parent)]) == 0


def test_keys_of_megatron_fsdp_from_another_format_are_its_own(tmp_path: Path) -> None:
    """With shapes and dtypes, as its own writer left them."""
    own = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    through = written(own, "torch_dist", tmp_path / "torch_dist")
    again = written(through, "fsdp_dtensor", tmp_path / "again")
    described = [
        {key: (item.size, item.properties.dtype) for key, item in metadata.items() if hasattr(item, "size")}
        for metadata in (
            dcp.FileSystemReader(source.path).read_metadata().state_dict_metadata for source in (own, again)
        )
    ]
    assert described[0] == described[1]
