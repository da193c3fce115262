"""Conversions killed at every change of a file or folder: something whole is there, and the command again ends well."""

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint import folders, placing
from hp_muon_plugin.checkpoint.canonical import Source, Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import differences, made_up, names

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR


def is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        _, mode, flags = arguments
        return mode[0] in "wax" if isinstance(mode, str) else bool(flags & WRITES)
    return event in CHANGES


def ended(source: Source, to: str, dst: Path, *, at: int, force: bool) -> bool:
    """Convert in a child that is killed just before its so manieth change; whether it came to its end before."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return status == 0
    code = 98
    try:
        counted = itertools.count(1)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if is_change(event, arguments) and next(counted) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        os.fsync = os.fdatasync = lambda handle: None  # what is written outlives a process, if not the machine
        sys.addaudithook(watch)
        convert(plan(source, to, Target()), dst, drop=True, force=force)
        code = 0
    finally:
        os._exit(code)


def found(dst: Path) -> Source | None:
    try:
        return open_checkpoint(dst)
    except CheckpointError:
        return None


def moments(source: Source, to: str, folder: Path, before: Source | None) -> Iterator[Path]:
    """Destinations of conversions, each killed one change later than the one before."""
    for at in itertools.count(1):
        dst = folder / f"{at}" / "out"
        if before is not None:
            convert(plan(before, to, Target()), dst, drop=True)
        if ended(source, to, dst, at=at, force=before is not None):
            assert at > 8
            return
        yield dst


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a machine that stops."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: None)


@pytest.mark.parametrize("to", ["hp", "fsdp2"])
def test_a_killed_conversion_is_finished_by_the_same_command(to: str, tmp_path: Path) -> None:
    """Between the rename and the tracker the checkpoint was whole, not to be opened, and "there already"."""
    source = made_up(1, layers=1)
    whole = 0
    for dst in moments(source, to, tmp_path, None):
        there = found(dst)
        assert there is None or not differences(source, there)
        try:
            report, told = convert(plan(source, to, Target()), dst, drop=True), ""
        except ConfigError as error:
            told = str(error)
        if told:  # nothing was left to do but to remove the lock
            assert "is there already" in told
            assert there is not None
            assert not list(dst.rglob(".hp_muon_unfinished"))
            whole += 1
        else:
            assert report.nbytes == sum(info.nbytes for info in source.tensors().values())
            assert report.tensors == report.body["xxh3_128"]
            assert not [name for name in names(dst.rglob("*")) + names(dst.parent.iterdir()) if "hp_muon" in name]
        assert not differences(source, open_checkpoint(dst))
    assert whole == 1


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("to", ["hp", "fsdp2"])
def test_a_killed_replacement_leaves_the_old_or_the_new_one_to_read(
    to: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two renames there was neither."""
    if not can_exchange:
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)  # as on a file system without
    source, before = made_up(1, layers=1), made_up(1, layers=2)
    seen = set()
    for dst in moments(source, to, tmp_path, before):
        there = found(dst)
        assert there is not None
        state = [not differences(each, there) for each in (before, source)]
        assert sorted(state) == [False, True]
        seen.add(state.index(True))
        if not dst.exists():
            with pytest.raises(ConfigError, match="is there already"):
                convert(plan(made_up(1, layers=3), to, Target()), dst, drop=True)
        convert(plan(source, to, Target()), dst, drop=True, force=True)
        assert not differences(source, open_checkpoint(dst))
        assert not [name for name in names(dst.rglob("*")) + names(dst.parent.iterdir()) if "hp_muon" in name]
    assert seen == {0, 1}


def test_another_conversion_is_not_taken_for_the_killed_one(tmp_path: Path) -> None:
    """One whole checkpoint without a tracker: only its own command may go on with it."""
    source = made_up(1, layers=1)
    dst = next(
        path
        for path in moments(source, "hp", tmp_path, None)
        if (path / "iter_0000007" / ".hp_muon_unfinished").exists()
    )
    kept = names((dst / "iter_0000007").iterdir())
    other = made_up(1, layers=1)
    other.state().vocab_size = 5
    for refused in (plan(made_up(1, layers=2), "hp", Target()), plan(other, "hp", Target())):
        with pytest.raises(ConfigError, match="is there already"):
            convert(refused, dst, drop=True)
    assert names((dst / "iter_0000007").iterdir()) == kept
    convert(plan(source, "hp", Target()), dst, drop=True)
    assert names(dst.iterdir()) == ["iter_0000007", "latest_checkpointed_iteration.txt"]


def test_names_change_in_one_step_or_not_at_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    changed = folders.exchange(tmp_path / "a", tmp_path / "b")
    assert names((tmp_path / "a").iterdir()) == (["b"] if changed else ["a"])
    assert names((tmp_path / "b").iterdir()) == (["a"] if changed else ["b"])
    assert not folders.exchange(tmp_path / "a", tmp_path / "nowhere")


def test_one_that_opened_the_lock_before_it_was_removed_does_not_hold_it(tmp_path: Path) -> None:
    """It locked a file without a name, while another locked the new one."""
    path = tmp_path / "lock"
    with placing._locked(path):
        early = placing._opened(path)
    try:
        assert not placing._is_locked(early, path)
        with placing._locked(path):
            assert not placing._is_locked(early, path)
            with pytest.raises(CheckpointError, match="another conversion"), placing._locked(path):
                pass
    finally:
        os.close(early)
    assert not path.exists()
