"""What ``hp-muon ckpt`` and the script with Ascend's flags say to what users mistype or have half of."""

import os
from pathlib import Path

import pytest

from hp_muon_plugin.cli import bench, ckpt
from tests.checkpoint.fixtures import unpacked
from tests.checkpoint.others import fixture
from tests.checkpoint.test_tools import script


@pytest.mark.parametrize(
    ("run", "arguments", "flag"),
    [
        (ckpt.run, ["convert", "a", "b", "--to", "hf", "--weights"], "--weights"),
        (ckpt.run, ["convert", "a", "b", "--to", "hf", "--dro"], "--dro"),
        (ckpt.run, ["inspect", "a", "--js"], "--js"),
        (bench.run, ["newton-schulz", "--sec", "3"], "--sec"),
        (bench.run, ["fsdp", "--sec", "3"], "--sec"),
        (bench.run, ["optimizer", "--sec", "3"], "--sec"),
        (bench.run, ["trainer", "--sec", "3"], "--sec"),
        (bench.run, ["convert", "--fold", "x"], "--fold"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_beginning_of_a_flag_is_no_flag(
    run: object, arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--w`` left the optimizer's state out, and ``--dro`` dropped what the target has no place for."""
    assert callable(run)
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_a_file_that_is_cut_off_is_a_short_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a line for every tensor, which is a hundred thousand for a large model."""
    folder = unpacked("mcore016_moe_ep2_dp2_dpr", tmp_path) / "ckpt"
    for file in folder.rglob("*.distcp"):
        os.truncate(file, 1000)
    assert ckpt.run(["inspect", str(folder)]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert "ends at byte 1000, but" in lines[0]
    assert "more of this kind" in lines[-2]
    assert lines[-1].startswith("  fix: ")


def test_a_message_about_a_cut_file_tells_its_true_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt"
    for file in folder.rglob("*.distcp"):
        os.truncate(file, 1000)
    assert ckpt.run(["inspect", str(folder)]) == 3
    assert "ends at byte 1000, but" in capsys.readouterr().err


def test_the_fix_of_a_loss_is_a_flag_of_the_script(tmp_path: Path) -> None:
    """Megatron to Megatron on more ranks has no random state for some: "pass --drop", which the script did not know."""
    base = ["--load-model-type", "mg", "--save-model-type", "mg", "--load-dir", "a", "--save-dir", "b"]
    assert "--drop" not in script().translated(base)
    assert "--drop" in script().translated([*base, "--drop"])
