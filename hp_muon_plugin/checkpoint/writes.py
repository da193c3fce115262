"""Bytes that threads write at their places in files, block by block, as they are read.

A block is read, hashed, summed and written while it is in a core's cache: pieces of 16 MiB, handed from a thread that
reads to one that writes, came from memory in each of these steps, and a conversion took twice the processor time.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

from hp_muon_plugin.checkpoint.hashing import BLOCK_BYTES, Room
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes
from hp_muon_plugin.errors import CheckpointError

WAITING_BYTES = 2**26

Buffer = bytes | memoryview
Result = TypeVar("Result")


class Thread:
    """A thread that writes, in the order in which it is asked to.

    Args:
        room: For bytes in memory that wait to be written.
        name: Of the thread.
    """

    def __init__(self, room: Room, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._room = room
        self._pending: deque[Future[Any]] = deque()
        self.nbytes = 0

    def put(self, work: Callable[[], Result], nbytes: int, held: int = 0) -> "Future[Result]":
        """Have something done.

        Args:
            work: What to do.
            nbytes: Bytes that it writes.
            held: Bytes that it holds in memory until it is done.

        Returns:
            Its result. An error also ends a later call.
        """
        self.nbytes += nbytes
        if held:
            self._room.take(held)
        future = self._pool.submit(self._do, held, work)
        self._pending.append(future)
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        return future

    def finish(self) -> None:
        """Wait for all of it."""
        while self._pending:
            self._pending.popleft().result()

    def shut_down(self) -> None:
        """End the thread; what it has not begun is left."""
        self._pool.shutdown(cancel_futures=True)

    def _do(self, held: int, work: Callable[[], Result]) -> Result:
        try:
            return work()
        finally:
            if held:
                self._room.give(held)


class Writes:
    """Threads that read, compute checksums and write. As a context it ends with all of it done, or with its error.

    Args:
        jobs: How many threads.
        waiting_bytes: Bytes in memory that may wait to be written.
    """

    def __init__(self, jobs: int = 1, waiting_bytes: int = WAITING_BYTES) -> None:
        room = Room(waiting_bytes)
        self.threads = [Thread(room, f"write-{index}") for index in range(jobs)]
        self._stopped = threading.Event()

    @property
    def idlest(self) -> int:
        """Index of the thread that was given the fewest bytes: the same from run to run, and so are the files."""
        return min(range(len(self.threads)), key=lambda index: self.threads[index].nbytes)

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`shut_down` was called."""
        return self._stopped.is_set()

    def finish(self) -> None:
        """Wait for all of it."""
        for thread in self.threads:
            thread.finish()

    def blocks(
        self, value: Lazy, count: Callable[[int], None], start: int = 0, stop: int | None = None
    ) -> Iterator[memoryview]:
        """The memory of a tensor's rows, each time as many as a core's cache holds.

        Args:
            value: The tensor; read block by block.
            count: Called with the bytes of each block when it has been used.
            start: First index of dimension 0.
            stop: One past the last; None for all that follow.

        Raises:
            CheckpointError: If the threads were shut down meanwhile.
        """
        length = (value.shape[0] if value.shape else 1) if stop is None else stop
        row_bytes = value.dtype.itemsize * prod(value.shape[1:])
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for first in range(start, length, step):
            if self.is_stopped:
                raise CheckpointError("writing was given up")
            rows = value.rows(first, min(first + step, length))
            if rows.numel():
                yield raw_bytes(rows)
            count(rows.nbytes)

    def shut_down(self) -> None:
        """End the threads; what they have not begun is left, and what they have is given up."""
        self._stopped.set()
        for thread in self.threads:
            thread.shut_down()

    def __enter__(self) -> "Writes":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.shut_down()


class SharedFile:
    """A file that several threads write. One does so at a time, as the kernel would have it, but others do not spin.

    Args:
        handle: Of the file.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()

    def write(self, place: int, part: Buffer) -> None:
        """Write all of a buffer.

        Args:
            place: First byte in the file.
            part: The bytes.
        """
        with self._lock:
            write_at(self._handle, place, part)


def write_at(handle: int, place: int, part: Buffer) -> None:
    """Write all of a buffer.

    Args:
        handle: Of a file.
        place: First byte in it.
        part: The bytes.
    """
    left = memoryview(part)
    while left:
        count = os.pwrite(handle, left[:BLOCK_BYTES], place)
        place += count
        left = left[count:]
