"""Where a conversion may write: not over what is no checkpoint, and a mistake is one message."""

from pathlib import Path

import pytest

from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.errors import CheckpointError
from tests.checkpoint.fixtures import names, unpacked
from tests.reading import as_somebody_else

NAME = "mcore019_muon_lwl_dense_dp2_dpr"


@pytest.mark.parametrize("name", ["file", "file/below", "dangling/below"])
def test_a_destination_that_cannot_be_is_said_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended in tracebacks of mkdir."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "file")
    assert run(["convert", str(fixture), str(tmp_path / name), "--to", "hp"]) == 2
    assert "file is a file\n  fix: name a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_what_the_system_refuses_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    readonly = tmp_path / "readonly"
    readonly.mkdir(mode=0o555)
    with as_somebody_else(tmp_path):
        assert run(["convert", str(fixture), str(readonly / "out"), "--to", "hp"]) == 2
        assert "readonly cannot be written to\n  fix: " in capsys.readouterr().err
    (fixture / "iter_0000003" / "metadata.json").chmod(0)
    with as_somebody_else(tmp_path):
        assert run(["inspect", str(fixture)]) == 2
    assert "metadata.json" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "place"), [("hp", "out/iter_0000003"), ("fsdp2", "out")])
def test_force_replaces_checkpoints_and_nothing_else(
    to: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--force`` removed whatever lay there, a folder of several checkpoints or a home among it."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    mine = tmp_path / place / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    command = ["convert", str(fixture), str(tmp_path / "out"), "--to", to, "--force"]
    assert run(command) == 2
    assert "holds something that is no checkpoint" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    mine.unlink()
    assert run(command) == 0
    assert run(command) == 0
    (tmp_path / place / ".metadata").write_bytes(b"damaged")
    assert run(command) == 0


def test_folders_that_users_named_are_not_taken_for_left_overs(tmp_path: Path) -> None:
    """A backup ``out.old`` beside the destination was renamed to ``out`` and then removed, ``out.partial`` at once."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    for name in ("out.old", "out.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    for options in ([], ["--force"]):
        assert run(["convert", str(fixture), str(tmp_path / "out"), "--to", "fsdp2", *options]) == 0
    assert [path.read_text() for path in sorted(tmp_path.glob("out.*/*"))] == ["mine", "mine"]


@pytest.mark.parametrize("to", ["hp", "fsdp2"])
def test_a_link_to_the_destination_stays_a_link(to: str, tmp_path: Path) -> None:
    """It was replaced by a folder, its old name stayed behind, and the next conversion failed on that."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    for options in ([], ["--force"], ["--force"]):
        assert run(["convert", str(fixture), str(tmp_path / "link"), "--to", to, *options]) == 0
    assert (tmp_path / "link").is_symlink()
    assert names((tmp_path / "disk").iterdir()) == ["out"]
    open_checkpoint(tmp_path / "link").close()


def test_digits_that_are_none_are_no_iteration(tmp_path: Path) -> None:
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    (fixture / "latest_checkpointed_iteration.txt").write_text("\N{SUPERSCRIPT THREE}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="instead of an iteration"):
        open_checkpoint(fixture)


@pytest.mark.parametrize("to", ["hp", "fsdp2"])
def test_a_failed_conversion_leaves_no_folder_that_it_made(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    for shard in fixture.glob("iter_*/*.distcp"):
        shard.write_bytes(shard.read_bytes()[:64])
    (tmp_path / "mine").mkdir()
    for place in ("mine/deep/out", "new/deep/out"):
        assert run(["convert", str(fixture), str(tmp_path / place), "--to", to]) != 0
        assert "\n" in capsys.readouterr().err
    assert names(tmp_path.iterdir()) == sorted(["mine", fixture.parent.name])
    assert names((tmp_path / "mine").iterdir()) == []


def test_a_source_that_is_none_is_told_with_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    for source, message in (
        ("nowhere", "nowhere does not exist"),
        ("notes", "notes is no checkpoint of a known format: it holds thesis.txt"),
    ):
        assert run(["inspect", str(tmp_path / source)]) == 2
        assert f"{message}\n  fix: name the folder" in capsys.readouterr().err
