"""Saving over real ranks and files: atomic whatever is killed, never the next step's values, no rank left waiting."""

import logging
import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks

from hp_muon_plugin.checkpoint.agreement import Team
from hp_muon_plugin.checkpoint.canonical import RunState
from hp_muon_plugin.checkpoint.folders import MANIFEST, iterations, read_tracker
from hp_muon_plugin.checkpoint.loading import open_checkpoint, open_latest, read, read_state
from hp_muon_plugin.checkpoint.manifest import read_manifest
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.checkpoint.ranges import held_chunks
from hp_muon_plugin.checkpoint.saving import Saver
from hp_muon_plugin.checkpoint.torch_files import METADATA, Reader
from hp_muon_plugin.errors import CheckpointError
from hp_muon_plugin.train.setup import Launch

SHAPE = (7, 5)  # 35 elements: ranks hold pieces of rows


def part_of(tensor: torch.Tensor, rank: int, size: int) -> Part:
    """A rank's range of a (7, 5) matrix; ``tensor`` is its memory."""
    start, stop = 35 * rank // size, 35 * (rank + 1) // size
    return Part("weight/w", SHAPE, held_chunks(SHAPE, None, 0, start, stop), tensor, start)


def own_range(value: float, rank: int, size: int) -> torch.Tensor:
    start, stop = 35 * rank // size, 35 * (rank + 1) // size
    return torch.arange(start, stop, dtype=torch.float32) + value


def contents(tensor: torch.Tensor, step: int, rank: int = 0, size: int = 1) -> Any:
    state = RunState(
        iteration=step,
        hyper={f"p{rank}": {"lr": 0.5}},
        steps={f"p{rank}": float(step)},
        random={f"rank{rank}": {"torch": torch.full((4,), rank, dtype=torch.uint8), "python": (3, (1, 2), None)}},
    )
    return lambda: ([part_of(tensor, rank, size)], state)


def whole(folder: Path, team: Team) -> tuple[torch.Tensor, RunState]:
    found = open_checkpoint(folder, team)
    tensor = torch.zeros(SHAPE)
    read(found, [Part.whole("weight/w", tensor)], team)
    return tensor, read_state(found, lambda name: name.startswith("random/"))


def _two_saves(launch: Launch, save: Path, asynchronous: bool) -> Any:
    joined(launch)
    team = Team()
    saver = Saver(save, team, asynchronous=asynchronous, keep=2)
    held = own_range(100, launch.rank, launch.world_size)
    saver.save(1, contents(held, 1, launch.rank, launch.world_size))
    held.add_(100)  # the next step comes before the first is written
    saver.save(2, contents(held, 2, launch.rank, launch.world_size))
    held.add_(100)
    while saver.is_busy:
        saver.poll()
    values = [whole(save / f"iter_{step:07d}", team) for step in (1, 2)]
    saver.save(3, contents(held, 3, launch.rank, launch.world_size))
    saver.wait()
    return values, saver.last


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "blocking"])
def test_a_checkpoint_holds_the_values_of_its_step(asynchronous: bool, tmp_path: Path) -> None:
    values, last = run_ranks(3, _two_saves, tmp_path, asynchronous)[1]
    for step, (tensor, state) in enumerate(values, start=1):
        assert torch.equal(tensor, torch.arange(35.0).view(SHAPE) + 100 * step)
        assert (state.iteration, state.steps) == (step, {f"p{rank}": float(step) for rank in range(3)})
        assert [int(state.random[f"rank{rank}"]["torch"][0]) for rank in range(3)] == [0, 1, 2]
        assert state.random["rank2"]["python"] == (3, (1, 2), None)
    assert last == 3
    assert iterations(tmp_path) == [2, 3]  # the newest two
    assert read_tracker(tmp_path) == 3


def _other_sizes(launch: Launch, save: Path) -> Any:
    joined(launch)
    team = Team()
    tensor = torch.zeros(own_range(0, launch.rank, launch.world_size).shape)
    read(open_checkpoint(save, team), [part_of(tensor, launch.rank, launch.world_size)], team)
    return tensor.tolist()


def test_other_numbers_of_ranks_read_their_own_ranges(tmp_path: Path) -> None:
    run_ranks(3, _two_saves, tmp_path, False)
    for size in (2, 4):
        pieces = run_ranks(size, _other_sizes, tmp_path)
        assert [value for piece in pieces for value in piece] == [300.0 + number for number in range(35)]


def _failing(launch: Launch, save: Path, kind: str) -> str:
    joined(launch)
    saver = Saver(save, Team(), asynchronous=kind == "thread")
    held = own_range(0, launch.rank, launch.world_size)
    saver.save(1, contents(held, 1, launch.rank, launch.world_size))
    saver.wait()

    def broken() -> Any:
        raise ValueError("no such weight")

    if launch.rank == 1 and kind != "contents":  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    given = broken if launch.rank == 1 and kind == "contents" else contents(held, 2, launch.rank, launch.world_size)
    try:
        saver.save(2, given)
        while saver.is_busy:
            saver.poll()
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("kind", ["contents", "disk", "thread"])
def test_a_rank_that_cannot_save_stops_all_ranks_with_its_reason(kind: str, tmp_path: Path) -> None:
    told = run_ranks(2, _failing, tmp_path, kind)
    assert told[0] == told[1]
    assert told[0].startswith(f"saving step 2 in {tmp_path}: rank 1: ")
    assert ("ValueError: no such weight" if kind == "contents" else "File too large") in told[0]
    assert iterations(tmp_path) == [1]
    assert read_tracker(tmp_path) == 1
    assert ("fix: make room on the disk" in told[0]) == (kind != "contents")
    if kind != "contents":
        assert not list(tmp_path.glob("*partial"))


def _cut_short(launch: Launch, path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
        Team().gathered("saving", lambda: torch.save(torch.zeros(4000), path))
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_torch_s_words_for_a_full_disk_are_explained(tmp_path: Path) -> None:
    """All that one read was: enforce fail at inline_container.cc, unexpected pos 704 vs 598."""
    (told,) = run_ranks(1, _cut_short, tmp_path / "weights.pt")
    assert "inline_container" in told
    assert "fix: make room on the disk" in told


def _save_and_die(launch: Launch, save: Path, step: int, at: int) -> int:
    """One more checkpoint, killed at its ``at``-th change of files; tells how many there are."""
    seen = [0]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if is_write or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    saver = Saver(save, Team(), keep=2)
    sys.addaudithook(watch)
    saver.save(step, contents(own_range(step, 0, 1), step))
    return seen[0]


def _in_child(function: Any, *arguments: Any) -> int | None:
    """What a forked process returned; None if it was killed."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        answer = function(None, *arguments)
        os.write(sender, str(answer).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    assert text or os.WIFSIGNALED(status), status
    return int(text) if text else None


@pytest.mark.slow  # a process for each of some 25 moments
@pytest.mark.parametrize("is_again", [False, True], ids=["next", "again"])
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(is_again: bool, tmp_path: Path) -> None:
    """At every rename, removal and opening of a file: the latest is the old or the new one, and the next save works.

    ``again``: the checkpoint of a step replaces one of the same step, after the run went back.
    """
    assert _in_child(_save_and_die, tmp_path, 1, 0)
    assert _in_child(_save_and_die, tmp_path, 2, 0)
    step, points = 2 if is_again else 3, 0
    for at in range(1, 60):
        finished = _in_child(_save_and_die, tmp_path, step, at)
        tracked = read_tracker(tmp_path)
        assert tracked is not None
        assert is_again or (tmp_path / f"iter_{tracked:07d}" / MANIFEST).is_file(), f"point {at}"
        found = open_latest(tmp_path, Team())
        assert found is not None
        tensor, state = whole(found.folder, Team())
        assert state.iteration in (step - 1 + is_again, step), f"point {at}"
        assert torch.equal(tensor, torch.arange(35.0).view(SHAPE) + state.iteration)
        if finished is not None:
            break
        points += 1
        step = step if is_again else state.iteration + 1
    else:
        pytest.fail("a save has no end")
    assert points > 10
    kept = (1, 2) if is_again else (step - 1, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["latest_checkpointed_iteration.txt", *(f"iter_{number:07d}" for number in kept)]
    )


def _replaced(launch: Launch, save: Path) -> Any:
    team = Team()
    saver = Saver(save, team, keep=1, spared=save / "iter_0000001")
    for step in (1, 5, 3, 3):  # it went back from 5 to 2, and saves 3 twice
        saver.save(step, contents(own_range(step, 0, 1), step))
    return iterations(save), read_tracker(save)


def test_the_newest_stay_whatever_their_steps(tmp_path: Path) -> None:
    assert _replaced(Launch(0, 1, 0, ""), tmp_path) == ([1, 3], 3)


def test_auto_takes_the_last_whole_one_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_latest(tmp_path / "none", Team()) is None
    team, saver = Team(), Saver(tmp_path, Team())
    for step in (1, 2, 3):
        saver.save(step, contents(own_range(step, 0, 1), step))
    data = tmp_path / "iter_0000003" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    (tmp_path / "iter_0000002" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is damaged"):
        open_checkpoint(tmp_path, team)
    with caplog.at_level(logging.WARNING):
        found = open_latest(tmp_path, team)
    assert found is not None
    assert found.folder.name == "iter_0000001"
    assert "iter_0000003 is not whole" in caplog.text
    assert f"going on from {tmp_path / 'iter_0000001'}, not from {tmp_path / 'iter_0000003'}" in caplog.text
    data.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match="bytes"):
        open_checkpoint(tmp_path / "iter_0000003", team, verify=False)


def test_damage_that_is_not_looked_for_is_named_by_tensor(tmp_path: Path) -> None:
    team, saver = Team(), Saver(tmp_path, Team())
    saver.save(1, contents(own_range(1, 0, 1), 1))
    data = tmp_path / "iter_0000001" / "__0_0.distcp"
    raw = data.read_bytes()
    place = raw.index(torch.arange(1.0, 36.0).numpy().tobytes()[:16])
    data.write_bytes(raw[: place - 300] + bytes(200) + raw[place - 100 :])
    found = open_checkpoint(tmp_path, team, verify=False)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: weight/w at byte \d+ cannot be read"):
        read(found, [Part.whole("weight/w", torch.zeros(SHAPE))], team)
    wanted = Part("weight/w", (9, 5), held_chunks((9, 5), None, 0, 40, 42), torch.zeros(2), 40)
    with pytest.raises(CheckpointError, match="0 of 2 elements"):
        read(found, [wanted], team)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_metadata_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Saver(tmp_path, Team()).save(1, contents(own_range(1, 0, 1), 1))
    folder = tmp_path / "iter_0000001"
    (folder / METADATA).write_bytes(pickle.dumps(_Bomb()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"wants posix\.mkdir"):
        Reader(folder, read_manifest(folder)).read_metadata()
    assert not (tmp_path / "ran").exists()
