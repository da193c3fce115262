"""Reader of HyperParallel's own checkpoints.

Each rank has ``_rank<r>_.safetensors``, which on torch is a torch.save archive in spite of its name, and objects lie
in ``<key>_rank<r>.bytes``. ``.metadata`` tells which rank has which rows.
"""

from pathlib import Path
from typing import Any

from hp_muon_plugin.checkpoint import lazy, torch_archive
from hp_muon_plugin.checkpoint.files import Files, safe_join
from hp_muon_plugin.checkpoint.formats.base import LazySource
from hp_muon_plugin.checkpoint.formats.fsdp2 import Keyed, by_name
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.safe_pickle import Stored, load_metadata, load_values
from hp_muon_plugin.checkpoint.safetensors_files import read_header
from hp_muon_plugin.checkpoint.zip_directory import MAGIC
from hp_muon_plugin.errors import CheckpointError, DamageError

NAME = "hyper_parallel"
METADATA = ".metadata"


def open_hyper_parallel(path: Path) -> LazySource:
    """Open a checkpoint.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: If metadata or a rank's file is missing or damaged, or rows of a tensor are in no file.
    """
    files = Files(path)
    tensors: dict[str, dict[int, Lazy]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    objects: dict[str, Any] = {}
    opened: dict[str, dict[str, Lazy]] = {}
    for metadata in _metadata(files, path):
        try:
            _take(files, metadata, tensors, shapes, objects, opened)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise DamageError(f"{path}: its metadata is damaged: {error}") from error
    whole = {key: _whole(path, key, parts, shapes[key]) for key, parts in tensors.items()}
    flat: dict[str, Any] = {}
    for key, value in objects.items():
        _flatten(key, value, flat)
    return by_name(NAME, Keyed(path, whole, list(flat), flat.__getitem__, files))


def _metadata(files: Files, path: Path) -> list[Any]:
    """One description of all ranks, or one of each if they were written without collectives."""
    found = [METADATA] if (path / METADATA).is_file() else sorted(item.name for item in path.glob(".rank*_metadata"))
    if not found:
        raise DamageError(f"{path} has no {METADATA}: the checkpoint was never finished, or not copied whole")
    return [load_metadata(files.read(name, 0, files.size(name)), str(path / name)) for name in found]


def _take(
    files: Files,
    metadata: Any,
    tensors: dict[str, dict[int, Lazy]],
    shapes: dict[str, tuple[int, ...]],
    objects: dict[str, Any],
    opened: dict[str, dict[str, Lazy]],
) -> None:
    for index, info in metadata.storage_data.items():
        key, file = str(index.fqn), str(info.relative_path)
        safe_join(files.folder, file)
        described = metadata.state_dict_metadata[key]
        if described.class_name.endswith("BytesStorageMetadata"):
            objects[key] = _object(files, file)
            continue
        shapes[key] = tuple(int(length) for length in described.size)
        offset = tuple(int(first) for first in index.offset or ())
        if any(offset[1:]):
            raise CheckpointError(f"{files.folder}: {key} is cut along another dimension than the first")
        if file not in opened:
            opened[file] = _rank_file(files, file)
        if key not in opened[file]:
            raise DamageError(f"{files.folder / file} should hold {key}, but does not")
        tensors.setdefault(key, {})[offset[0] if offset else 0] = opened[file][key]


def _rank_file(files: Files, file: str) -> dict[str, Lazy]:
    """Tensors of a rank's file, of either kind that its name may hide."""
    if files.read(file, 0, 4) != MAGIC:
        return read_header(files, file)
    archive = torch_archive.Archive(files, file)
    if not isinstance(archive.value, dict):
        raise DamageError(f"{files.folder / file} holds no dict of tensors")
    return {
        key: lazy.in_archive(files, archive.located(value), key)
        for key, value in archive.value.items()
        if isinstance(value, Stored)
    }


def _object(files: Files, file: str) -> Any:
    if files.read(file, 0, 2) == MAGIC[:2]:
        return torch_archive.load(files, file)
    return load_values(files.read(file, 0, files.size(file)), str(files.folder / file))


def _whole(path: Path, key: str, parts: dict[int, Lazy], shape: tuple[int, ...]) -> Lazy:
    ordered = [parts[first] for first in sorted(parts)]
    if not shape:
        return ordered[0]
    at = 0
    for first in sorted(parts):
        if first != at or parts[first].shape[1:] != shape[1:]:
            raise DamageError(
                f"{path}: rows {at} to {first} of {key} are in no file, or in two"
                if first != at
                else f"{path}: a part of {key} has shape {parts[first].shape}, the whole {shape}"
            )
        at += parts[first].shape[0]
    if at != shape[0]:
        raise DamageError(f"{path}: rows {at} to {shape[0]} of {key} are in no file")
    return lazy.rows_of(ordered)


def _flatten(key: str, value: Any, flat: dict[str, Any]) -> None:
    """The keys that torch's planner would give: dicts and lists of dicts opened."""
    if key == "hp_muon":
        flat[key] = value
    elif isinstance(value, dict) and value:
        for inner, item in value.items():
            _flatten(f"{key}.{inner}", item, flat)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            _flatten(f"{key}.{index}", item, flat)
    else:
        flat[key] = value
