"""Which format a folder holds, and which iteration of it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.folders import standing
from hp_muon_plugin.checkpoint.safe_pickle import load_metadata
from hp_muon_plugin.errors import CheckpointError, DamageError

TRACKER = "latest_checkpointed_iteration.txt"
_SHOWN = 5
_ITERATION = re.compile(r"iter_\d{7,}\Z")
_INTEGER_STATE = re.compile(r"optimizer\.state\.\d+\.|optimizer\.\d+\.state\.")
_FSDP_DTENSOR = ("model.module.", "optimizer.state.module.module.module.")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint.

    Attributes:
        folder: Folder of its files.
        format: Name of its format.
        root: Folder of the tracker file, if one named the iteration.
    """

    folder: Path
    format: str
    root: Path | None


def find(path: Path) -> Found:
    """Find the checkpoint at a path.

    Args:
        path: Folder of a checkpoint, or of its tracker file.

    Raises:
        CheckpointError: If there is none, or its format is unknown.
    """
    path = standing(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist\n  fix: name the folder of a checkpoint, or of its {TRACKER}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder\n  fix: name the folder of the checkpoint")
    tracker = path / TRACKER
    if not tracker.is_file():
        return Found(path, _format(path), None)
    text = tracker.read_text(errors="replace").strip()
    folder = path / (
        "release" if text == "release" else f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else "\0"
    )
    if folder.name == "\0":
        raise CheckpointError(f"{tracker} holds {text[:40]!r} instead of an iteration\n  fix: name the folder itself")
    folder = standing(folder)
    if not folder.is_dir():
        there = sorted(item.name for item in path.iterdir() if _ITERATION.match(item.name))
        raise CheckpointError(
            f"{tracker} names {folder.name}, which is not there; there are: {', '.join(there) or 'none'}\n"
            "  fix: name the folder of an iteration"
        )
    return Found(folder, _format(folder), path)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like one checkpoint of a known format, whole or damaged, and not like several.

    Args:
        folder: A folder.
    """
    try:
        _format(folder)
    except CheckpointError:
        return any(folder.glob("*.distcp")) or (folder / ".metadata").is_file()
    return True


def _format(folder: Path) -> str:
    names = {item.name for item in folder.iterdir()}
    if "manifest.json" in names and _is_ours(folder / "manifest.json"):
        return "hp"
    if "metadata.json" in names:
        return "torch_dist"
    if any(name.startswith("mp_rank_") for name in names):
        return "torch"
    if ".metadata" in names:
        return _of_metadata(folder)
    if any(name.startswith(".rank") and name.endswith("_metadata") for name in names):
        return "hyper_parallel"
    if "model.safetensors.index.json" in names or any(name.endswith(".safetensors") for name in names):
        return "hf"
    hints = sorted(name for name in names if _ITERATION.match(name) or name == "release")
    if hints:
        raise CheckpointError(f"{folder} has no {TRACKER}\n  fix: name one of its folders: {', '.join(hints)}")
    if any(name.endswith(".distcp") for name in names):
        raise DamageError(f"{folder} has .distcp files but no .metadata: it was never finished, or not copied whole")
    raise CheckpointError(
        f"{folder} is no checkpoint of a known format: it holds {', '.join(sorted(names)[:_SHOWN]) or 'nothing'}\n"
        "  fix: name the folder with the checkpoint's own files, such as iter_0000100"
    )


def _is_ours(manifest: Path) -> bool:
    try:
        value = json.loads(manifest.read_text())
    except ValueError:
        return (manifest.parent / ".metadata").is_file()  # a damaged one, which its reader names
    return isinstance(value, dict) and value.get("format") == "hp_muon_plugin"


def _of_metadata(folder: Path) -> str:
    files = Files(folder)
    raw = files.read(".metadata", 0, files.size(".metadata"))
    files.close()
    if b"hyper_parallel.core.checkpoint" in raw:
        return "hyper_parallel"
    keys = list(load_metadata(raw, str(folder / ".metadata")).state_dict_metadata)
    if any(key.startswith(_FSDP_DTENSOR[0]) for key in keys) and not any(_INTEGER_STATE.match(key) for key in keys):
        return "fsdp_dtensor"
    if any(_INTEGER_STATE.match(key) for key in keys) or {"checkpoint_version", "args"} <= set(keys):
        return "torch_dcp"
    return "fsdp2"
