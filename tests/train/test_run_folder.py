"""One run per folder at a time, and nothing of an earlier run is lost or mixed in."""

import fcntl
import os
import resource
from pathlib import Path

import pytest
from reading import as_somebody_else

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.run_folder import claimed, write_config


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def finish_a_run(folder: Path, *, ranks: int) -> None:
    with claimed(folder):
        (folder / "config.yaml").write_text("x")
        (folder / "metrics.jsonl").write_text(f"{ranks}\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events.1").touch()
        for rank in range(ranks):
            (folder / f"rank{rank}.log").touch()


def test_what_an_earlier_run_left_is_moved_away(tmp_path: Path) -> None:
    """A second run wrote into the same TensorBoard folder, and logs of ranks that it did not have stayed."""
    run = tmp_path / "run"
    finish_a_run(run, ranks=4)
    (run / "checkpoint").mkdir()  # not ours to move
    finish_a_run(run, ranks=2)
    with claimed(run):
        assert names(run) == {".lock", "earlier", "checkpoint"}
    first = {"config.yaml", "metrics.jsonl", "tensorboard", *(f"rank{rank}.log" for rank in range(4))}
    assert names(run / "earlier" / "001") == first
    assert names(run / "earlier" / "002") == first - {"rank2.log", "rank3.log"}
    assert (run / "earlier" / "001" / "metrics.jsonl").read_text() == "4\n"


def test_a_folder_that_another_run_holds_is_refused(tmp_path: Path) -> None:
    with claimed(tmp_path):
        (tmp_path / "metrics.jsonl").write_text("mine\n")
        with (
            pytest.raises(ConfigError, match=rf"another run is writing there \(process {os.getpid()}\)"),
            claimed(tmp_path),
        ):
            pass
        assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"
    with claimed(tmp_path):
        pass


def test_a_foreign_configuration_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("the user's own\n")
    with pytest.raises(ConfigError, match=r"holds a config\.yaml that no run has written"), claimed(tmp_path):
        pass
    assert (tmp_path / "config.yaml").read_text() == "the user's own\n"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    message = r"run\.dir=.*locked: cannot be written to .*Permission denied"
    with as_somebody_else(tmp_path), pytest.raises(ConfigError, match=message), claimed(folder):
        pass


def test_a_file_system_without_locks_still_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def no_locks(stream: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claimed(tmp_path):
        pass


def test_an_error_of_the_run_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claimed(tmp_path):
        (tmp_path / "absent").read_text()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The lock's file still held what it had no room for, and its end failed with a traceback."""
    message = rf"run\.dir={tmp_path}: cannot be written to \(.*File too large\)"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match=message), claimed(tmp_path):
            pass
        with pytest.raises(ConfigError, match=message):
            write_config(Train(optimizer=HpMuon()), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
