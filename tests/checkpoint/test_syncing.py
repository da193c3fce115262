"""What is written reaches the disk before a checkpoint gets its name, and a disk that refuses is heard."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.syncing import Syncing, sync_file
from tests.checkpoint.fixtures import made_up

TRACKED = ("torch_dist", "torch", "fsdp_dtensor", "hp")


class Recorded:
    """Real syncs, and what each file was when it was synced last."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync = sync
        self.seen: dict[int, tuple[int, int]] = {}

    def __call__(self, handle: int) -> None:
        now = os.fstat(handle)
        self._sync(handle)
        self.seen[now.st_ino] = (now.st_size, now.st_mtime_ns)


@pytest.mark.parametrize("to", [*TRACKED, "fsdp2", "torch_dcp", "hyper_parallel"])
def test_every_file_and_folder_was_synced_after_its_last_byte(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(os.fsync)
    monkeypatch.setattr(os, "fsync", recorded)
    done = convert(plan(made_up(2), to, Target(shard_bytes=2**19)), tmp_path / "new", drop=True)
    found = [done.folder, *done.folder.rglob("*")]
    assert len(found) > 3
    for path in found:
        now = path.stat()
        assert recorded.seen.get(now.st_ino) == (now.st_size, now.st_mtime_ns), path


def test_files_are_synced_while_they_grow_and_those_that_did_not_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(os.fdatasync)
    monkeypatch.setattr(os, "fdatasync", recorded)
    with Syncing(tmp_path, 0) as syncing:
        (tmp_path / "a").write_bytes(b"1")
        syncing.advance(2**27 - 1)
    assert recorded.seen == {}
    with Syncing(tmp_path, 0) as syncing:
        syncing.advance(2**27)
        syncing.start()
    first = dict(recorded.seen)
    assert [size for size, _ in first.values()] == [1]
    with Syncing(tmp_path, 0) as syncing:
        syncing.start()
        syncing.start()
        (tmp_path / "b").write_bytes(b"22")
        syncing.start()
    assert sorted(size for size, _ in recorded.seen.values()) == [1, 2]


def test_a_disk_that_refuses_ends_the_work_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/null")  # which cannot be synced
    with pytest.raises(OSError, match="Invalid argument"):
        sync_file(tmp_path / "device")
    with pytest.raises(OSError, match="Invalid argument"), Syncing(tmp_path, 0) as syncing:
        syncing.start()
    with pytest.raises(ZeroDivisionError), Syncing(tmp_path, 0) as syncing:  # noqa: PT012
        syncing.start()
        raise ZeroDivisionError
