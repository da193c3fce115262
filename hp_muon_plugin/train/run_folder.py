"""The folder of one run: held by one run at a time, and cleared of the one before.

A lock of the operating system goes with its process, however that ends. What an earlier run left is
moved to ``earlier/001``, ``earlier/002``, ...; nothing is overwritten or deleted.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hp_muon_plugin.config.train_options import save_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.probe import probe_folder

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_LOCK = ".lock"
_WRITTEN = (CONFIG, METRICS, TENSORBOARD, "rank*.log", "rank*.error.json")
_EARLIER = "earlier"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a network file system without locks: go on without


def check_folder(folder: Path) -> None:
    """Check that a run's folder can be written to, and leave nothing there.

    Args:
        folder: The run's folder.

    Raises:
        ConfigError: If it cannot.
    """
    try:
        probe_folder(folder)
    except OSError as error:
        raise unwritable_folder(folder, error) from None


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a run's folder, made and empty of what runs write.

    One process of the run calls it: the launcher, or rank 0 under torchrun.

    Args:
        folder: The run's folder.

    Yields:
        Nothing.

    Raises:
        ConfigError: If another run holds it, it cannot be written to, or it belongs to somebody else.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            is_new = not (folder / _LOCK).exists()
            lock = stack.enter_context((folder / _LOCK).open("a+", encoding="ascii"))
            _lock(lock, folder)
            _refuse_foreign(folder, is_new=is_new)
            _move_earlier(folder)
        except OSError as error:
            raise unwritable_folder(folder, error) from None
        yield


def write_config(config: Train, folder: Path) -> None:
    """Write the options of a run, for its ranks and for the user.

    Args:
        config: Checked options.
        folder: The run's folder.

    Raises:
        ConfigError: If it cannot be written, as on a full disk.
    """
    try:
        save_train(config, folder / CONFIG)
    except OSError as error:
        raise unwritable_folder(folder, error) from None


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves the reason of its failure.

    Args:
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The path.
    """
    return folder / f"rank{rank}.error.json"


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank other than 0 writes its output, and every rank its traceback.

    Args:
        folder: The run's folder.
        rank: Global rank.

    Returns:
        The path.
    """
    return folder / f"rank{rank}.log"


def unwritable_folder(folder: Path | str, error: OSError) -> ConfigError:
    """What to say where a run's folder cannot be written to.

    Args:
        folder: The run's folder.
        error: What the system said.

    Returns:
        The error to raise.
    """
    place = f"{error.filename}: " if error.filename else ""
    return ConfigError(
        "run.dir",
        folder,
        f"cannot be written to ({place}{error.strerror or error})",
        "choose a folder that you may write to, e.g. run.dir=outputs/train",
    )


def _lock(lock: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ConfigError(
            "run.dir",
            folder,
            f"another run is writing there (process {lock.read().strip() or 'unknown'})",
            "give this run a name of its own with run.name=..., or wait until the other has ended",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    lock.truncate(0)
    os.write(lock.fileno(), str(os.getpid()).encode("ascii"))  # not kept for when it is closed, which would fail again


def _refuse_foreign(folder: Path, *, is_new: bool) -> None:
    """A ``config.yaml`` where no run has been yet is somebody else's."""
    if is_new and (folder / CONFIG).exists() and not (folder / METRICS).exists():
        raise ConfigError(
            "run.dir",
            folder,
            f"holds a {CONFIG} that no run has written",
            "choose a folder for the run alone, e.g. run.dir=outputs/train",
        )


def _move_earlier(folder: Path) -> None:
    left = [path for pattern in _WRITTEN for path in folder.glob(pattern)]
    if not left:
        return
    numbers = [int(path.name) for path in (folder / _EARLIER).glob("*") if path.name.isdigit()]
    target = folder / _EARLIER / f"{max(numbers, default=0) + 1:03}"
    target.mkdir(parents=True)
    for path in left:
        path.rename(target / path.name)
