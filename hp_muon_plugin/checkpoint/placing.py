"""How a converted checkpoint gets its name: lock, temporary folder, rename, tracker last. Kills do no harm."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hp_muon_plugin.checkpoint.detect import TRACKER, is_checkpoint
from hp_muon_plugin.checkpoint.folders import NO_ROOM, OLD, PARTIAL, publish, standing, sync_folder, write_durably
from hp_muon_plugin.checkpoint.syncing import sync_file
from hp_muon_plugin.errors import CheckpointError, ConfigError

_LOCK = ".hp_muon_convert.lock"
_MARK = ".hp_muon_unfinished"
"""Lies in a whole checkpoint until the tracker names it, and says which conversion wrote it."""
_SPARE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a conversion goes.

    Attributes:
        final: Folder of the checkpoint.
        root: Folder of the tracker file; None for formats without one.
        iteration: What the tracker will name.
    """

    final: Path
    root: Path | None
    iteration: int

    @property
    def partial(self) -> Path:
        """Folder that is written; it gets the final name when it is whole."""
        return self.final.with_name(self.final.name + PARTIAL)

    @property
    def old(self) -> Path:
        """Name of a checkpoint that is being replaced."""
        return self.final.with_name(self.final.name + OLD)


def destination(dst: Path, iteration: int, *, is_tracked: bool) -> Destination:
    """Where a checkpoint is written: behind symbolic links, which stay.

    Args:
        dst: As the user names it.
        iteration: Of the source.
        is_tracked: Whether the format has a tracker file.
    """
    dst = Path(os.path.realpath(dst))
    if not is_tracked:
        return Destination(dst, None, iteration)
    return Destination(Path(os.path.realpath(dst / f"iter_{iteration:07d}")), dst, iteration)


def check(target: Destination, source: Path, nbytes: int, *, force: bool) -> None:
    """Refuse a destination that would harm something.

    Args:
        target: The destination.
        source: Folder of the source.
        nbytes: Bytes that will be written.
        force: Whether an existing checkpoint may be replaced; nothing else ever is.

    Raises:
        ConfigError: If it is the source, there already, or no folder that can be written.
        CheckpointError: If the disk has no room.
    """
    final, inside = target.final.resolve(), source.resolve()
    if final == inside or inside in final.parents or final in inside.parents:
        raise ConfigError("DST", target.final, "is the source, or lies in it or around it", "name another folder")
    nearest = next(parent for parent in (final, *final.parents) if parent.exists())
    if not nearest.is_dir():
        raise ConfigError("DST", target.final, f"{nearest} is a file", "name a folder")
    there = standing(final)
    if there.exists() and any(there.iterdir()):
        if not force:
            fix = "name another folder, or pass --force to replace it"
            raise ConfigError("DST", target.final, "is there already", fix)
        if not is_checkpoint(there):
            why = "holds something that is no checkpoint, which --force does not replace"
            raise ConfigError("DST", target.final, why, "name another folder, or empty this one yourself")
    for folder in {nearest if nearest != final else final.parent, target.root or nearest}:
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise ConfigError("DST", target.final, f"{folder} cannot be written to", "name a folder that can")
    free, needed = shutil.disk_usage(nearest).free, nbytes + _SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"{nearest} has {free / 2**30:.2f} GiB free, the checkpoint needs {needed / 2**30:.2f} GiB\n"
            "  fix: free some, or name a folder on another disk"
        )


@contextmanager
def placed(target: Destination, note: Callable[[str], None] = lambda text: None, what: str = "") -> Iterator[Path]:
    """Give an empty folder to write; when the block ends without an error it becomes the checkpoint.

    Args:
        target: The destination.
        note: Told what was cleaned up.
        what: Tells this conversion from others, for :func:`finish`.

    Raises:
        CheckpointError: If another conversion writes there, or the disk is full.
    """
    folder = target.final.parent
    with _made(folder), _locked(_lock_of(target)):
        for text in restore(target):
            note(text)
        target.partial.mkdir()
        try:
            yield target.partial
            (target.partial / _MARK).write_text(what, encoding="utf-8")
            _sync_all(target.partial)
            publish(target.partial, target.final)
        except OSError as error:
            shutil.rmtree(target.partial, ignore_errors=True)
            if error.errno in NO_ROOM:
                raise CheckpointError(
                    f"{folder}: {error.strerror} while writing; what was written is removed, nothing else was touched\n"
                    "  fix: free some space, or name a folder on another disk"
                ) from error
            raise
        except BaseException:
            shutil.rmtree(target.partial, ignore_errors=True)
            raise
        _name(target)


def finish(target: Destination, what: str) -> bool:
    """Finish a conversion that was killed when its checkpoint was whole, before the tracker named it.

    Args:
        target: The destination.
        what: Tells the conversion from others.

    Returns:
        Whether there was one, and the same.

    Raises:
        CheckpointError: If another conversion writes there.
    """
    mark = target.final / _MARK
    if not mark.is_file():
        return False
    with _locked(_lock_of(target)):
        if not mark.is_file() or mark.read_text(encoding="utf-8", errors="replace") != what:
            return False
        restore(target)
        _name(target)
    return True


def _name(target: Destination) -> None:
    try:
        if target.root is not None:
            write_durably(target.root / TRACKER, str(target.iteration))
        (target.final / _MARK).unlink()
        sync_folder(target.final)
    except OSError as error:
        raise CheckpointError(
            f"{target.final} is whole, but not named in {TRACKER}: {error.strerror}\n"
            "  fix: see to that, and give the same command again, which finishes it"
        ) from error


def _lock_of(target: Destination) -> Path:
    return target.final.parent / (_LOCK if target.root else f".{target.final.name}{_LOCK}")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder, made if it is not there; after an error what was made goes, if nothing is in it."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in made:
            try:
                parent.rmdir()
            except OSError:
                break
        raise


def restore(target: Destination) -> list[str]:
    """Clean up after a conversion that was killed: a replaced checkpoint comes back, half-written ones go.

    Args:
        target: The destination; locked.

    Returns:
        What was done, in words.
    """
    done = []
    if target.old.exists():
        if target.final.exists():
            shutil.rmtree(target.old)
        else:
            target.old.rename(target.final)
            sync_folder(target.final.parent)
            done.append(f"{target.final} is back: a conversion that was to replace it was interrupted")
    if target.partial.exists():
        shutil.rmtree(target.partial)
        done.append(f"removed {target.partial}, left by an interrupted conversion")
    return done


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system drops when the process dies."""
    handle = _opened(path)
    try:
        while not _is_locked(handle, path):
            os.close(handle)
            handle = _opened(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_locked(handle: int, path: Path) -> bool:
    """Whether the file that was locked is the one under the name: its last holder may have removed it since."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise CheckpointError(
            f"another conversion is writing to {path.parent}\n  fix: wait for it, or name another folder"
        ) from error
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
