"""Folders of torch.distributed.checkpoint written piece by piece, in files of bounded size.

torch.distributed.checkpoint and megatron-core load the result: every tensor is a set of chunks, whatever size each
has, so a tensor larger than memory is written as many.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import torch_archive_write
from hp_muon_plugin.checkpoint.boxes import Box, overlapping
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.writes import WAITING_BYTES, Buffer, Thread, Writes, write_at
from hp_muon_plugin.errors import CheckpointError

Written = Callable[[str, Buffer], None]


def waiting_bytes(budget: int) -> int:
    """What may wait for a thread to write it.

    Args:
        budget: Bytes of tensors in memory at any time, about.
    """
    return min(WAITING_BYTES, budget // 8)


def _ignore(_: int) -> None:
    """Count nothing."""


@dataclass(slots=True)
class _Lane:
    """A thread with the file that it writes.

    Attributes:
        thread: The thread.
        file: Its file; None before the first byte and when it is full.
        name: Of the file.
        at: Bytes that it will have.
    """

    thread: Thread
    file: io.FileIO | None = None
    name: str = ""
    at: int = 0


class DcpWriter:
    """Writes a folder; :meth:`close` makes it whole. As a context, it stays without metadata after an error.

    Where each chunk goes is known at once; threads read, compute checksums and write, each in a file of its own.

    Args:
        folder: An empty folder.
        shard_bytes: A file is closed when it holds this much.
        written: Called in the order of each file with its name and what was written.
        waiting_bytes: Bytes of chunks in memory that may wait to be written.
        jobs: How many threads.
    """

    def __init__(
        self,
        folder: Path,
        shard_bytes: int = 4 * 2**30,
        written: Written | None = None,
        waiting_bytes: int = WAITING_BYTES,
        jobs: int = 1,
    ) -> None:
        self._written = written
        self._writes = Writes(jobs, waiting_bytes)
        self._lanes = [_Lane(thread) for thread in self._writes.threads]
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._number = -1
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
        """Write a chunk that is in memory.

        Args:
            key: A declared tensor.
            chunk: Contiguous, on the CPU, of the tensor's rank. It must not be changed before :meth:`close`.
            offsets: Where it begins.
        """
        value = Lazy(tuple(chunk.shape), chunk.dtype, lambda a, b: chunk[a:b] if chunk.dim() else chunk)
        self._put(self._writes.idlest, key, offsets, chunk.shape, partial(self._writes.blocks, value, _ignore), chunk)

    def copy(
        self,
        key: str,
        value: Lazy,
        count: Callable[[int], None],
        chunk_bytes: int,
        index: Sequence[int] = (),
        flat_at: int | None = None,
    ) -> None:
        """Write a tensor that is read meanwhile, in as many chunks as memory asks of those who will read them.

        One thread reads and writes all of it, in order.

        Args:
            key: A declared tensor.
            value: What is written.
            count: Called in the thread with bytes as they are written.
            chunk_bytes: Largest chunk, if a row is not larger.
            index: Which item of a stack it is, if the declared tensor is one.
            flat_at: First element of it in the declared tensor, if that is flat.
        """
        lane = self._writes.idlest
        rest = tuple(value.shape[1:])
        for start, stop in row_pieces(value.shape, value.dtype.itemsize, chunk_bytes):
            found = partial(self._writes.blocks, value, count, start, stop)
            if flat_at is not None:
                row = prod(rest)
                shape, offsets = [(stop - start) * row], [flat_at + start * row]
            elif value.shape:
                shape = [*(1 for _ in index), stop - start, *rest]
                offsets = [*index, start, *(0 for _ in rest)]
            else:
                shape, offsets = [1 for _ in index], list(index)
            self._put(lane, key, offsets, shape, found)

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
        content = buffer.getvalue()
        self._objects[key] = self._append(0, len(content), lambda: [content], len(content))

    def close(self, planner_data: dict[str, Any] | None = None, extra: dict[str, Any] | None = None) -> None:
        """Check that every element was written once, and write ``.metadata``.

        Args:
            planner_data: Path of each flat key in the nested state dict, as torch's planner has it.
            extra: Further attributes of the metadata, as megatron-core's ``mcore_data``.

        Raises:
            CheckpointError: If a tensor has a hole, or elements that were written twice.
        """
        self._finish_files()
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
            self._close_files()

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

    def _put(
        self,
        lane: int,
        key: str,
        offsets: Sequence[int],
        shape: Sequence[int],
        found: Callable[[], Iterable[Buffer]],
        held: torch.Tensor | None = None,
    ) -> None:
        """Have a chunk written."""
        _, dtype, boxes, pieces = self._tensors[key]
        assert len(offsets) == len(shape), key
        assert held is None or held.dtype == dtype, key
        boxes.append(Box(tuple(offsets), tuple(shape)))
        archive = torch_archive_write.TensorArchive(dtype, torch.Size(shape))
        pieces.append(
            self._append(lane, archive.nbytes, lambda: archive.parts(found()), 0 if held is None else held.nbytes)
        )

    def _append(
        self, number: int, nbytes: int, parts: Callable[[], Iterable[Buffer]], held: int
    ) -> tuple[str, int, int]:
        """Have bytes written behind what a thread has got already. Returns their file, place and number."""
        lane = self._lanes[number]
        if lane.file is not None and lane.at >= self._shard_bytes:
            lane.thread.put(lane.file.close, 0)
            lane.file = None
        if lane.file is None:
            self._number += 1
            lane.name, lane.at = f"__0_{self._number}.distcp", 0
            lane.file = open(self._folder / lane.name, "xb", buffering=0)  # noqa: SIM115
        start = lane.at
        lane.at += nbytes
        lane.thread.put(partial(self._store, lane.file.fileno(), lane.name, start, nbytes, parts), nbytes, held)
        return lane.name, start, nbytes

    def _store(self, handle: int, name: str, start: int, nbytes: int, parts: Callable[[], Iterable[Buffer]]) -> None:
        """Write parts one after another."""
        place = start
        for part in parts():
            write_at(handle, place, part)
            place += len(part)
            if self._written is not None:
                self._written(name, part)
        assert place == start + nbytes, name

    def _finish_files(self) -> None:
        self._writes.finish()
        self._writes.shut_down()
        self._close_files()

    def _close_files(self) -> None:
        for lane in self._lanes:
            if lane.file is not None:
                lane.file.close()
                lane.file = None


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
