"""Exit codes of ``hp-muon ckpt``: 3 for a checkpoint that is damaged, 2 for what is no checkpoint or cannot be done."""

import os
import shutil
from pathlib import Path

import pytest

from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import FORMATS, open_checkpoint
from hp_muon_plugin.cli.ckpt import run
from tests.checkpoint.fixtures import unpacked
from tests.checkpoint.others import written

NOT_WRITTEN = "torch_dist"  # the fixture is in this format
SMALLEST = 64


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small checkpoint in every format."""
    folder = tmp_path_factory.mktemp("whole")
    found = {NOT_WRITTEN: unpacked("mcore016_moe_ep2_dp2_dpr", folder) / "ckpt"}
    source = open_checkpoint(found[NOT_WRITTEN])
    for name in FORMATS:
        if name != NOT_WRITTEN:
            written(source, name, folder / name, Target()).close()
            found[name] = folder / name
    source.close()
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= SMALLEST)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", ["half", "start", "gone"])
def test_every_file_that_is_cut_off_is_damage(
    name: str, damage: str, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify`` of a cut file ended with 2, as for a folder that does not exist."""
    assert run(["verify", str(whole[name])]) == 0
    codes = {}
    for number, file in enumerate(files_of(whole[name])):
        if damage == "gone" and (name == "hf" or not (file.suffix in (".distcp", ".pt") or "rank" in file.name)):
            continue  # by the others a format is known
        folder = tmp_path / str(number)
        shutil.copytree(whole[name], folder)
        hurt = folder / file.relative_to(whole[name])
        if damage == "gone":
            hurt.unlink()
        else:
            os.truncate(hurt, hurt.stat().st_size // 2 if damage == "half" else 20)
        to = ["convert", str(folder), str(tmp_path / f"out{number}"), "--to", "hp", "--drop"]
        codes[str(hurt.relative_to(folder))] = (run(["verify", str(folder)]), run(to))
        assert not (tmp_path / f"out{number}").exists()
        shutil.rmtree(folder)
    assert codes or (name, damage) == ("hf", "gone")  # of one file
    assert set(codes.values()) <= {(3, 3)}, (codes, capsys.readouterr().err)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("nothing")
    for name in ("gone", "empty", "file", "notes"):
        for command in (["verify"], ["inspect"], ["convert", "--to", "hp"]):
            destination = [str(tmp_path / "out")] if command[0] == "convert" else []
            assert run([command[0], str(tmp_path / name), *destination, *command[1:]]) == 2
    assert capsys.readouterr().err.count("fix: ") == 12
