"""Bytes that a thread writes at their places in files, while the next ones are read."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from hp_muon_plugin.checkpoint.hashing import Room

WAITING_BYTES = 2**26
_BLOCK_BYTES = 2**20
"""Written at a time: what is larger gets the large pages that were free longest, slow in virtual machines."""
_AT_ONCE_BYTES = 2**16  # less is written where it is: handing it to another thread takes longer

Buffer = bytes | memoryview
Result = TypeVar("Result")


class Writes:
    """A thread that computes checksums and writes. As a context it ends with all of it done, or with its error.

    Two would wait for each other: a file has one writer at a time.

    Args:
        waiting_bytes: Bytes that may wait to be written.
    """

    def __init__(self, waiting_bytes: int = WAITING_BYTES) -> None:
        self._pool = ThreadPoolExecutor(1, "write")
        self._room = Room(waiting_bytes)
        self._pending: deque[Future[Any]] = deque()

    def put(self, nbytes: int, work: Callable[[], Result]) -> "Future[Result]":
        """Have something done, once there is room for it.

        Args:
            nbytes: Bytes that it holds until it is done.
            work: What to do.

        Returns:
            Its result. An error also ends a later call.
        """
        if nbytes < _AT_ONCE_BYTES:
            done: Future[Result] = Future()
            done.set_result(work())
            return done
        self._room.take(nbytes)
        future = self._pool.submit(self._do, nbytes, work)
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

    def __enter__(self) -> "Writes":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.shut_down()

    def _do(self, nbytes: int, work: Callable[[], Result]) -> Result:
        try:
            return work()
        finally:
            self._room.give(nbytes)


def write_at(handle: int, place: int, parts: Sequence[Buffer]) -> None:
    """Write all of some buffers.

    Args:
        handle: Of a file.
        place: First byte in it.
        parts: One after another.
    """
    for part in parts:
        left = memoryview(part)
        while left:
            count = os.pwrite(handle, left[:_BLOCK_BYTES], place)
            place += count
            left = left[count:]
