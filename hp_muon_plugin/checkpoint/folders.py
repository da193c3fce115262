"""Folders of checkpoints and the tracker file that names the latest: every change is one rename.

``SAVE/iter_0000010`` is a checkpoint, ``SAVE/latest_checkpointed_iteration.txt`` holds ``10``, as in Megatron.
A checkpoint is written to ``SAVE/iter_0000010.hp_muon_partial`` and renamed when it is whole. One that is there changes
names with it in one step where the system can (Linux, on most file systems); elsewhere it makes room for a moment, in
which it is read from ``SAVE/iter_0000010.hp_muon_old``.
"""

import ctypes
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from hp_muon_plugin.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Written last: a folder without it is no checkpoint."""
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL = ".hp_muon_partial"
"""Ends the name of what is being written. What is found under it is removed, so it is no name that users give."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk, quota or file limit."""
OLD = ".hp_muon_old"
"""Ends the name of what is being replaced; likewise."""
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_FOLDER = re.compile(r"iter_(\d{7,})")
_LEFT_OVER = re.compile(rf"iter_\d{{7,}}({re.escape(PARTIAL)}|{re.escape(OLD)})")


def folder_of(save: Path, iteration: int) -> Path:
    """The folder of one checkpoint.

    Args:
        save: Folder of all checkpoints of a run.
        iteration: Optimizer steps done.

    Returns:
        Its path.
    """
    return save / f"iter_{iteration:07d}"


def iterations(save: Path) -> list[int]:
    """Checkpoints that are there under their final name, ascending.

    Args:
        save: Folder of all checkpoints of a run; it need not exist.

    Returns:
        Their iterations.
    """
    if not save.is_dir():
        return []
    found = (_FOLDER.fullmatch(path.name) for path in save.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def newest_first(save: Path) -> list[Path]:
    """Checkpoints in the order in which they were written, the last one first.

    A run that went back to an earlier step writes smaller iterations after greater ones.

    Args:
        save: Folder of all checkpoints of a run; it need not exist.

    Returns:
        Folders; those without a manifest come last.
    """

    def written(folder: Path) -> tuple[int, str]:
        try:
            return (folder / MANIFEST).stat().st_mtime_ns, folder.name
        except OSError:
            return 0, folder.name

    return sorted((folder_of(save, iteration) for iteration in iterations(save)), key=written, reverse=True)


def read_tracker(save: Path) -> int | None:
    """What the tracker names.

    Args:
        save: Folder of all checkpoints of a run.

    Returns:
        An iteration; None without a tracker.

    Raises:
        CheckpointError: If it holds something else than a number.
    """
    path = save / TRACKER
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{path}: holds {text!r:.50}, not a number of steps\n  fix: name the folder to resume from"
        )
    return int(text)


def named_checkpoint(given: Path) -> Path:
    """The checkpoint of ours that a user names: itself, or the folder of checkpoints whose tracker names it.

    Args:
        given: As named.

    Returns:
        Its folder, which has a manifest.

    Raises:
        CheckpointError: If it is none.
    """
    if (given / MANIFEST).is_file():
        return given
    try:
        iteration = read_tracker(given)
    except CheckpointError as error:
        why = str(error).partition("\n")[0]
    else:
        if iteration is not None and (standing(folder_of(given, iteration)) / MANIFEST).is_file():
            return standing(folder_of(given, iteration))
        why = f"there is neither {MANIFEST} nor {TRACKER}"
        if iteration is not None:
            why = f"{TRACKER} names {folder_of(given, iteration).name}, which has no {MANIFEST}"
    raise CheckpointError(
        f"{given}: is no checkpoint of hp_muon_plugin: {why}\n"
        "  fix: name a folder such as .../checkpoints/iter_0000100, or convert it with hp-muon ckpt convert --to hp"
    )


def to_go_on_from(save: Path) -> list[Path]:
    """Checkpoints to resume from, as they are tried: the one that the tracker names, then the newest first.

    Args:
        save: Folder of all checkpoints of a run; it need not exist.
    """
    found = newest_first(save)
    try:
        iteration = read_tracker(save)
    except CheckpointError as error:
        logger.warning("%s", error)
        return found
    if iteration is None:
        return found
    named = folder_of(save, iteration)
    return [named, *(folder for folder in found if folder != named)]


def write_tracker(save: Path, iteration: int) -> None:
    """Let the tracker name a checkpoint, atomically.

    Args:
        save: Folder of all checkpoints of a run.
        iteration: The checkpoint; it is whole.
    """
    write_durably(save / TRACKER, str(iteration))


def write_durably(path: Path, text: str) -> None:
    """Write a file that has either its old or its new content, whatever happens, and the new one once this returns.

    Args:
        path: The file.
        text: Its content.
    """
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk.

    Args:
        folder: The folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name; one that is there already goes once the new one stands.

    Args:
        partial: The folder as written.
        final: Its name.
    """
    sync_folder(partial)
    old = final.with_name(final.name + OLD)
    if final.exists():
        if exchange(partial, final):
            sync_folder(final.parent)
            shutil.rmtree(partial, ignore_errors=True)
            return
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step, so that each name stands at every moment.

    Args:
        one: A folder.
        other: Another one on the same file system.

    Returns:
        Whether it was done; the system, or the file system, may have no such step.
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0)


def standing(folder: Path) -> Path:
    """Where a checkpoint is read: under its name, or, while it is replaced or after a kill in that, where it made room.

    Args:
        folder: Its name.
    """
    old = folder.with_name(folder.name + OLD)
    return old if folder.name and not folder.exists() and old.is_dir() else folder


def clean(save: Path) -> list[Path]:
    """Remove what killed saves left. A folder whose replacement never got its name comes back.

    Args:
        save: Folder of all checkpoints of a run.

    Returns:
        What was removed.
    """
    if not save.is_dir():
        return []
    removed = []
    for path in sorted(save.iterdir()):
        if path.name == TRACKER + PARTIAL:
            path.unlink(missing_ok=True)
        if not _LEFT_OVER.fullmatch(path.name):
            continue
        final = path.with_name(path.name.rpartition(".")[0])
        if path.name.endswith(OLD) and not final.exists():
            path.rename(final)
            continue
        shutil.rmtree(path)
        removed.append(path)
    return removed


def retain(save: Path, keep: int | None, spared: Iterable[Path] = ()) -> list[Path]:
    """Remove all but the newest checkpoints.

    Args:
        save: Folder of all checkpoints of a run.
        keep: How many stay; None for all.
        spared: Folders that stay as well.

    Returns:
        What was removed. Each is renamed first, so that none is ever half there under its name.
    """
    if keep is None:
        return []
    stay = {path.resolve() for path in spared}
    removed = []
    for folder in newest_first(save)[keep:]:
        if folder.resolve() in stay:
            continue
        gone = folder.with_name(folder.name + PARTIAL)
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)
        removed.append(folder)
    return removed
