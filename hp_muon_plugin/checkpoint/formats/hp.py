"""Our own format: torch DCP files and a manifest. It holds everything that a canonical checkpoint has."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.canonical import Info, Key, Loss, RunState, Source, Target
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter, waiting_bytes
from hp_muon_plugin.checkpoint.folders import MANIFEST, write_durably
from hp_muon_plugin.checkpoint.hashing import HASH, piece_bytes
from hp_muon_plugin.checkpoint.manifest import (
    FileInfo,
    Manifest,
    check_files,
    hashed,
    manifest_text,
    read_manifest,
    with_tensors,
    without_tensors,
)
from hp_muon_plugin.checkpoint.writes import Buffer


class HpSource:
    """An opened checkpoint of ours.

    Args:
        path: Folder of the iteration.

    Raises:
        CheckpointError: If it is damaged or not whole.
    """

    format = "hp"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        check_files(path, self._manifest)
        self.folder = DcpFolder(path)
        problems = self.folder.problems()
        for name, info in self._manifest.tensors.items():
            stored = self.folder.tensors.get(name)
            if stored is None or Info(stored.shape, stored.dtype) != info:
                problems.append(f"{path}: {name} of the manifest is not in the files, or of another shape or dtype")
        self.folder.refuse(problems)
        self._infos = self._manifest.parameters()
        self._state: RunState | None = None

    def tensors(self) -> Mapping[Key, Info]:
        """As :class:`Source`."""
        return self._infos

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As :class:`Source`."""
        shape = self._manifest.tensors[str(key)].shape
        if not shape:
            return self.folder.read(str(key))
        rest = shape[1:]
        rows = (shape[0] if stop is None else stop) - start
        return self.folder.read(str(key), (start, *(0 for _ in rest)), (rows, *rest))

    def state(self) -> RunState:
        """As :class:`Source`."""
        if self._state is None:
            self._state = with_tensors(self._manifest.state, self.folder.read)
        return self._state

    def sources(self, key: Key) -> str:
        """Where a tensor comes from, for the plan."""
        return str(key)

    def file_problems(self) -> list[str]:
        """Files whose hash is not the one in the manifest; reads all of them."""
        return [
            f"{self.path / name}: its content is not what was written: {tensors}"
            for name, info in self._manifest.files.items()
            if hashed(self.path / name, info.algorithm) != info
            for tensors in [self._tensors_in(name)]
        ]

    def close(self) -> None:
        """Close files."""
        self.folder.close()

    def compare_rest(self) -> None:
        """As :meth:`~hp_muon_plugin.checkpoint.files.Files.compare_rest`."""
        self.folder.compare_rest()

    def _tensors_in(self, file: str) -> str:
        found = [
            name
            for name, tensor in self.folder.tensors.items()
            if any(piece is not None and piece.file == file for piece in tensor.pieces)
        ]
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        return f"it holds {shown}" if found else "it holds no tensors"


class HpWriter:
    """Writes our own format."""

    format = "hp"

    def losses(self, source: Source, target: Target) -> list[Loss]:
        """Nothing is lost."""
        return []

    def where(self, source: Source, target: Target) -> dict[Key, str]:
        """Key in the files of each canonical tensor, for the plan."""
        return {key: str(key) for key in source.tensors()}

    def write(self, source: Source, folder: Path, target: Target, count: Callable[[int], None], budget: int) -> None:
        """As :class:`~hp_muon_plugin.checkpoint.canonical.Writer`."""
        files = FileDigests()
        with DcpWriter(folder, target.shard_bytes, files.add, waiting_bytes(budget), target.jobs) as writer:
            manifest = self._write(source, writer, count, piece_bytes(budget))
            writer.close()
        manifest = replace(manifest, files=files.infos() | {".metadata": hashed(folder / ".metadata")})
        write_durably(folder / MANIFEST, manifest_text(manifest))

    def _write(self, source: Source, writer: DcpWriter, count: Callable[[int], None], piece: int) -> Manifest:
        infos: dict[str, Info] = {}
        for key, info in source.tensors().items():
            infos[str(key)] = info
            writer.declare(str(key), info.shape, info.dtype)
            writer.copy(str(key), lazy.canonical(source, key), count, piece)
        state, tensors = without_tensors(source.state())
        for name, value in tensors.items():
            value = value.contiguous().cpu()
            writer.add(name, value)
            infos[name] = Info(tuple(value.shape), value.dtype)
        return Manifest(state, infos, {})


class FileDigests:
    """Hashes of files, computed while they are written: each by one thread, from its first byte to its last."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}

    def add(self, file: str, part: Buffer) -> None:
        """Bytes appended to a file.

        Args:
            file: Its name.
            part: What was written.
        """
        if file not in self._hashes:
            self._hashes[file] = HASH()
        self._sizes[file] = self._sizes.get(file, 0) + len(part)
        self._hashes[file].update(part)

    def infos(self) -> dict[str, FileInfo]:
        """Size and hash of every file."""
        return {name: FileInfo(self._sizes[name], found.hexdigest()) for name, found in self._hashes.items()}


def open_source(path: Path) -> HpSource:
    """Open a checkpoint of ours.

    Args:
        path: Folder of the iteration.
    """
    return HpSource(path)
