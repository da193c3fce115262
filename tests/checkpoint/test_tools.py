"""The script with Ascend's flags: Hugging Face to Megatron's folders and back, by the real command line."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Key, Target
from hp_muon_plugin.checkpoint.convert import plan
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import ConfigError
from tests.checkpoint.others import fixture, written

SCRIPT = Path(__file__).parents[2] / "tools" / "convert_ckpt_v2.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_ckpt_v2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hugging_face_to_megatron_as_one_is_used_to(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    written(source, "hf", tmp_path / "hf")
    command = [
        *(sys.executable, str(SCRIPT), "--load-model-type", "hf", "--save-model-type", "mg"),
        *("--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg")),
        *("--target-tensor-parallel-size", "2", "--target-expert-parallel-size", "2"),
        *("--make-vocab-size-divisible-by", "16"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr
    found = open_checkpoint(tmp_path / "mg")
    for name in ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert torch.equal(found.read(Key(name, "weight")), source.read(Key(name, "weight")))
    assert found.state().args["expert_model_parallel_size"] == 2


def test_flags_that_we_cannot_honour_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", "a", "--save-dir", "b"]
    for flags, message in ((["--num-layer-list", "1,2"], "--num-layer-list: hp-muon ckpt convert has --option"),):
        with pytest.raises(SystemExit) as caught:
            script().translated([*base, *flags])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert script().translated(base)[:6] == ["ckpt", "convert", "a", "b", "--to", "torch"]


def test_a_source_of_the_other_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--load-model-type hf`` took Megatron's folders, and with --drop."""
    folder = fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt"
    written(open_checkpoint(folder), "hf", tmp_path / "hf")
    rest = ["--save-model-type", "mg", "--save-dir", "b"]
    for kind, source in (("hf", folder), ("mg", tmp_path / "hf")):
        with pytest.raises(SystemExit) as caught:
            script().check_source(["--load-model-type", kind, "--load-dir", str(source), *rest])
        assert caught.value.code == 2
        assert f"--load-model-type {kind}: {source}" in capsys.readouterr().err
    script().check_source(["--load-model-type", "hf", "--load-dir", str(tmp_path / "hf"), *rest])
    script().check_source(["--load-model-type", "mg", "--load-dir", str(folder), *rest])


def test_a_vocabulary_that_is_not_padded_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """The fix was "another tensor-parallel size", told while files were written."""
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    unpadded = written(source, "hf", tmp_path / "hf", Target(options={"vocab_size": "125"}))
    with pytest.raises(ConfigError, match=r"125 rows of the vocabulary(.|\n)*make_vocab_size_divisible_by=128"):
        plan(unpadded, "torch", Target(tp=2))
    assert plan(unpadded, "torch", Target(tp=2, options={"make_vocab_size_divisible_by": "64"})).to == "torch"
