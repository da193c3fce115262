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
from hp_muon_plugin.cli import ckpt
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


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    given = script().translated(list(arguments))
    code = ckpt.run(given[1:], script().respelt)
    return code, capsys.readouterr().err


def test_messages_name_the_flags_of_this_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They named --tp, --pp, --ep, SRC and DST, which the script does not have."""
    folder = fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt"
    written(open_checkpoint(folder), "hf", tmp_path / "hf", Target(options={"vocab_size": "125"}))
    base = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(tmp_path / "hf")]
    to = ["--save-dir", str(tmp_path / "mg")]
    sizes = {"tensor": "tp", "pipeline": "pp", "expert": "ep"}
    for axis in sizes:
        flag = f"--target-{axis}-parallel-size"
        for size in ("0", "3"):
            code, told = ended(capsys, *base, *to, flag, size)
            assert code == 2
            assert told.startswith(f"hp-muon: {flag}={size}: "), told
            assert not [short for short in sizes.values() if f"--{short}" in told]
    code, told = ended(capsys, *base, *to, "--target-tensor-parallel-size", "2")
    assert "of the training: --make-vocab-size-divisible-by=128" in told
    assert "--option" not in told
    code, told = ended(capsys, *base, *to, "--target-tensor-parallel-size", "2", "--expert-tensor-parallel-size", "3")
    assert told.startswith("hp-muon: --expert-tensor-parallel-size=3: "), told
    (tmp_path / "file").touch()
    code, told = ended(capsys, *base, "--save-dir", str(tmp_path / "file"))
    assert code == 2
    assert told.startswith(f"hp-muon: --save-dir={tmp_path}/file"), told
    assert "/file is a file" in told
    back = ["--load-model-type", "mg", "--save-model-type", "mg", "--load-dir", str(folder), *to]
    code, told = ended(capsys, *back, "--target-expert-parallel-size", "4")
    assert code == 2
    assert told.startswith("hp-muon: --save-model-type=mg: cannot hold all of the source:"), told
    assert "pass --drop" in told
    assert not (tmp_path / "mg").exists()


def test_flags_that_the_script_lacks_are_said_to_be_elsewhere() -> None:
    respelt = script().respelt
    assert respelt("take --weights-only or --option family=qwen3") == (
        "take hp-muon ckpt convert --weights-only or hp-muon ckpt convert --option family=qwen3"
    )
    for same in ("hp-muon ckpt convert --to hp", "a-DST=3 tp=2 --tpx --weights"):
        assert respelt(same) == same
    assert respelt("DST=out: --tp 2") == "--save-dir=out: --target-tensor-parallel-size 2"


def test_an_empty_folder_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script().translated(["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", "", "--save-dir", "b"])
    assert "argument --load-dir: is empty: name a folder" in capsys.readouterr().err
