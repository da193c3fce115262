"""Hashes of canonical tensors, computed while they are read."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from hp_muon_plugin.checkpoint.canonical import Info, Key, Kind, RunState, Source
from hp_muon_plugin.checkpoint.checksums import lock_of
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes

PIECE_BYTES = 16 * 2**20
"""Largest piece that is read where all of it is wanted at a time: the allocator keeps blocks of this size."""
BLOCK_BYTES = 2**21
"""Read, hashed and written at a time: it stays in a core's cache from one to the next."""

HASH = xxhash.xxh3_128
"""Of tensors, to find damage: 22 GB/s a core here where SHA-256 has 1.8, and a conversion needs it twice."""


class Room:
    """Bytes that may wait at a time.

    Args:
        limit: How many; a single larger piece may pass alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        """Wait until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes

    def give(self, nbytes: int) -> None:
        """Give room back."""
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()


class HashingSource:
    """A source that hashes what is read from it, at once: it is in the cache. Threads may share it.

    Args:
        source: The opened checkpoint.
        budget: Bytes of tensors that a thread may hold.
    """

    def __init__(self, source: Source, budget: int) -> None:
        self.format = source.format
        self.path = source.path
        self._source = source
        self.piece_bytes = block_bytes(budget)
        self._digests: dict[Key, Any] = {}  # of tensors of which a part was read: hundreds of bytes each
        self._found: dict[Key, str] = {}
        self._rows: dict[Key, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensors(self) -> Mapping[Key, Info]:
        """As :class:`Source`."""
        return self._source.tensors()

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As :class:`Source`. Rows that come in order are hashed on the way, also where some come twice."""
        rows = self._source.read(key, start, stop)
        end = start + (rows.shape[0] if rows.dim() else 1)
        with lock_of(key):
            done = self._rows.get(key, 0)
            if start <= done < end:
                self._rows[key] = end
                if key not in self._digests:
                    self._digests[key] = HASH()
                if rows.numel():
                    self._digests[key].update(raw_bytes(rows[done - start :] if done > start else rows))
                if end == self._length(key):
                    self._found[key] = self._digests.pop(key).hexdigest()
        return rows

    def state(self) -> RunState:
        """As :class:`Source`."""
        return self._source.state()

    def close(self) -> None:
        """As :class:`Source`."""
        self._source.close()

    def digest(self, key: Key) -> str:
        """Hash of a tensor's bytes in row-major order, by :data:`HASH`; what was not read in order is read again.

        Args:
            key: Which.
        """
        info, total = self._source.tensors()[key], self._length(key)
        step = max(1, self.piece_bytes * total // max(1, info.nbytes))
        while (start := self._rows.get(key, 0)) < total:
            self.read(key, start, min(total, start + step))
        return self._found.get(key) or str(HASH().hexdigest())

    def _length(self, key: Key) -> int:
        shape = self._source.tensors()[key].shape
        return shape[0] if shape else 1


class WeightsOnly:
    """A source without its optimizer state.

    Args:
        source: The opened checkpoint.
    """

    def __init__(self, source: Source) -> None:
        self.format = source.format
        self.path = source.path
        self._source = source
        self._infos = {key: info for key, info in source.tensors().items() if key.kind in (Kind.weight, Kind.buffer)}
        self._state = replace(source.state(), hyper={}, steps={}, momentum=None)

    def tensors(self) -> Mapping[Key, Info]:
        """As :class:`Source`."""
        return self._infos

    def read(self, key: Key, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As :class:`Source`."""
        return self._source.read(key, start, stop)

    def state(self) -> RunState:
        """As :class:`Source`."""
        return self._state

    def compare_rest(self) -> None:
        """As :meth:`~hp_muon_plugin.checkpoint.files.Files.compare_rest`."""
        compare_rest(self._source)

    def close(self) -> None:
        """As :class:`Source`."""
        self._source.close()


def compare_rest(source: Source) -> None:
    """Compare checksums of what was read out of order, if the files of a source have any.

    Args:
        source: The opened checkpoint.

    Raises:
        CheckpointError: If something is damaged.
    """
    if hasattr(source, "compare_rest"):
        source.compare_rest()


def piece_bytes(budget: int) -> int:
    """Size of the pieces that are read at a time.

    Args:
        budget: Bytes of tensors in memory at any time, about.
    """
    return min(PIECE_BYTES, max(1, budget // 8))


def block_bytes(budget: int) -> int:
    """As :func:`piece_bytes`, for what passes through a core's cache.

    Args:
        budget: Bytes of tensors in memory at any time, about.
    """
    return min(BLOCK_BYTES, piece_bytes(budget))


def pieces(info: Info, limit: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Ranges of rows of a tensor, each of at most ``limit`` bytes if a row is not larger.

    Args:
        info: The tensor; a 0-dim one is one row.
        limit: Bytes.
    """
    rows = info.shape[0] if info.shape else 1
    step = max(1, limit * max(1, rows) // max(1, info.nbytes))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
