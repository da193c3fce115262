"""A disk that is full at any moment, in any format: one message, what was there stays, nothing half is left."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.formats import FORMATS, open_checkpoint
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import differences, made_up, names

LIMITS = (0, 1, 700, 1500, 4000, 20_000, 200_000)
"""Largest files in bytes, as of a full disk."""


def converted(source: Source, to: str, dst: Path, limit: int, *, force: bool) -> str:
    """What a child that may write no larger files is told; empty if it came through."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        with open(ours, encoding="utf-8") as file:
            told = file.read()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return told
    code = 98
    try:
        torch.set_num_threads(1)
        os.fsync = os.fdatasync = lambda handle: None  # no machine stops here
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            convert(plan(source, to, Target()), dst, drop=True, force=force)
        except CheckpointError as error:
            os.write(theirs, str(error).encode())
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("to", sorted(set(FORMATS) - {"hf"}))
def test_a_full_disk_harms_nothing(to: str, tmp_path: Path) -> None:
    source, before = made_up(1, layers=1), made_up(1, layers=2)
    convert(plan(before, to, Target()), tmp_path / "old", drop=True)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "old").rglob("*")}
    for limit in LIMITS:
        told = converted(source, to, tmp_path / "new", limit, force=False)
        assert "File too large while writing; what was written is removed" in told
        told = converted(source, to, tmp_path / "old", limit, force=True)
        assert "File too large while writing; what was written is removed" in told
        assert names(tmp_path.iterdir()) == ["old"]
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "old").rglob("*") if path.is_file()} == {
            path: time for path, time in kept.items() if path.is_file()
        }
    assert not differences(before, open_checkpoint(tmp_path / "old"))
    for name, force in (("new", False), ("old", True)):
        assert converted(source, to, tmp_path / name, 2**24, force=force) == ""
        assert not differences(source, open_checkpoint(tmp_path / name))


def test_a_tracker_that_cannot_be_written_leaves_a_whole_checkpoint_and_is_told(tmp_path: Path) -> None:
    source, hindrance = made_up(1, layers=1), tmp_path / "latest_checkpointed_iteration.txt.hp_muon_partial"
    hindrance.mkdir()
    with pytest.raises(CheckpointError, match="iter_0000007 is whole, but not named in .*: Is a directory\n  fix: "):
        convert(plan(source, "hp", Target()), tmp_path)
    hindrance.rmdir()
    assert not differences(source, open_checkpoint(tmp_path / "iter_0000007"))
    convert(plan(source, "hp", Target()), tmp_path)
    assert not differences(source, open_checkpoint(tmp_path))
    with pytest.raises(ConfigError, match="is there already"):
        convert(plan(source, "hp", Target()), tmp_path)
