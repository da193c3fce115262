"""Folders of torch.distributed.checkpoint written piece by piece, in files of bounded size.

torch.distributed.checkpoint and megatron-core load the result: every tensor is a set of chunks, whatever size each
has, so a tensor larger than memory is written as many.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import torch_archive_write
from hp_muon_plugin.checkpoint.boxes import Box, overlapping
from hp_muon_plugin.checkpoint.writes import WAITING_BYTES, Buffer, Writes, write_at
from hp_muon_plugin.errors import CheckpointError

Parts = tuple[Buffer, ...]


def waiting_bytes(budget: int) -> int:
    """What may wait for a thread to write or to hash it.

    Args:
        budget: Bytes of tensors in memory at any time, about.
    """
    return min(WAITING_BYTES, budget // 8)


class _Bytes:
    """Bytes that are written as they are, as :class:`~hp_muon_plugin.checkpoint.torch_archive_write.TensorArchive`."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.nbytes = len(content)

    def parts(self) -> Parts:
        return (self._content,)


_Item = torch_archive_write.TensorArchive | _Bytes


class DcpWriter:
    """Writes a folder; :meth:`close` makes it whole. As a context, it stays without metadata after an error.

    Where each chunk goes is known at once; a thread computes checksums and writes, while the next chunk is read.

    Args:
        folder: An empty folder.
        shard_bytes: A file is closed when it holds this much.
        written: Called in the order of the file with its name, what will give the bytes of one item, and their number.
        waiting_bytes: Bytes of chunks that may wait to be written.
    """

    def __init__(
        self,
        folder: Path,
        shard_bytes: int = 4 * 2**30,
        written: Callable[[str, "Future[Parts]", int], None] | None = None,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._written = written
        self._writes = Writes(waiting_bytes)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._file: io.FileIO | None = None
        self._number = -1
        self._at = 0
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[Box], list[tuple[str, int, int]]]] = {}
        self._objects: dict[str, tuple[str, int, int]] = {}

    def declare(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Name a tensor before its chunks.

        Args:
            key: Its key.
            shape: Whole shape.
            dtype: Its dtype.
        """
        self._assert_new(key)
        if not torch_archive_write.is_writable(dtype):
            raise CheckpointError(f"{key} is {dtype}, which cannot be written to {self._folder}")
        self._tensors[key] = (tuple(shape), dtype, [], [])

    def write(self, key: str, chunk: torch.Tensor, offsets: Sequence[int]) -> None:
        """Write a chunk.

        Args:
            key: A declared tensor.
            chunk: Contiguous, on the CPU, of the tensor's rank. It must not be changed before :meth:`close`.
            offsets: Where it begins.
        """
        _, dtype, boxes, pieces = self._tensors[key]
        assert chunk.dtype == dtype, key
        assert len(offsets) == chunk.dim(), key
        boxes.append(Box(tuple(offsets), tuple(chunk.shape)))
        pieces.append(self._append(torch_archive_write.TensorArchive(chunk)))

    def add(self, key: str, value: torch.Tensor) -> None:
        """Declare and write a whole tensor.

        Args:
            key: Its key.
            value: Contiguous, on the CPU.
        """
        self.declare(key, value.shape, value.dtype)
        self.write(key, value, (0,) * value.dim())

    def add_object(self, key: str, value: Any) -> None:
        """Write a byte object, as ``torch.save`` makes it.

        Args:
            key: Its key.
            value: Anything that pickles.
        """
        self._assert_new(key)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._objects[key] = self._append(_Bytes(buffer.getvalue()))

    def close(self, planner_data: dict[str, Any] | None = None, extra: dict[str, Any] | None = None) -> None:
        """Check that every element was written once, and write ``.metadata``.

        Args:
            planner_data: Path of each flat key in the nested state dict, as torch's planner has it.
            extra: Further attributes of the metadata, as megatron-core's ``mcore_data``.

        Raises:
            CheckpointError: If a tensor has a hole, or elements that were written twice.
        """
        self._finish_file()
        self._writes.shut_down()
        for key, (shape, _, boxes, _) in self._tensors.items():
            full = [box for box in boxes if box.numel]
            missing = torch.Size(shape).numel() - sum(box.numel for box in full)
            if missing or overlapping(full):
                what = f"{missing} elements unwritten" if missing > 0 else "elements written twice"
                raise CheckpointError(f"{self._folder}: {key} has {what}; the checkpoint was not made")
        metadata = self._metadata(planner_data)
        metadata.__dict__.update(extra or {})
        with open(self._folder / ".metadata", "xb") as file:
            pickle.dump(metadata, file)

    def __enter__(self) -> "DcpWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._writes.shut_down()
            if self._file is not None:
                self._file.close()

    def _assert_new(self, key: str) -> None:
        assert key not in self._tensors, key
        assert key not in self._objects, key

    def _metadata(self, planner_data: dict[str, Any] | None) -> Any:
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        described: dict[str, Any] = {}
        places: dict[Any, Any] = {}
        for key, (shape, dtype, boxes, pieces) in self._tensors.items():
            chunks = [dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            described[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), chunks)
            for number, (box, piece) in enumerate(zip(boxes, pieces, strict=True)):
                places[dcp.MetadataIndex(key, torch.Size(box.offsets), number)] = _StorageInfo(*piece)
        for key, piece in self._objects.items():
            described[key] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(key)] = _StorageInfo(*piece)
        return dcp.Metadata(described, planner_data=planner_data, storage_data=places)

    def _append(self, item: _Item) -> tuple[str, int, int]:
        if self._file is not None and self._at >= self._shard_bytes:
            self._finish_file()
        if self._file is None:
            self._number += 1
            self._file = open(self._folder / self._name, "xb", buffering=0)  # noqa: SIM115
            self._at = 0
        start, handle = self._at, self._file.fileno()
        self._at += item.nbytes
        future = self._writes.put(item.nbytes, partial(self._store, handle, start, item))
        if self._written is not None:
            self._written(self._name, future, item.nbytes)
        return self._name, start, item.nbytes

    def _store(self, handle: int, start: int, item: _Item) -> Parts:
        """Write an item at its place. Returns its parts if somebody wants to hash them."""
        parts: Parts = item.parts()
        write_at(handle, start, parts)
        return parts if self._written is not None else ()

    @property
    def _name(self) -> str:
        return f"__0_{self._number}.distcp"

    def _finish_file(self) -> None:
        if self._file is None:
            return
        self._writes.finish()
        self._file.close()
        self._file = None


def row_pieces(shape: Sequence[int], itemsize: int, limit: int) -> list[tuple[int, int]]:
    """Ranges of rows of about equal size, each of at most ``limit`` bytes if a row is not larger.

    Args:
        shape: Of the tensor; a 0-dim one is one row.
        itemsize: Bytes of an element.
        limit: Bytes of a piece.

    Returns:
        (start, stop) of each, in order; one empty range for a tensor without rows.
    """
    rows = shape[0] if shape else 1
    row_bytes = max(1, itemsize * torch.Size(shape[1:]).numel())
    step = max(1, min(limit, torch_archive_write.MAX_BYTES) // row_bytes)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)] or [(0, 0)]
