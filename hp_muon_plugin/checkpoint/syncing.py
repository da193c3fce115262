"""Files brought to the disk while the next ones are written and read again: the disk is idle otherwise."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_EVERY_BYTES = 2**27
_MOST_TIMES = 64  # a large folder is looked through as often as a small one


class Syncing:
    """A thread that syncs the files of a folder. As a context it ends with its work, or with the disk's error.

    Args:
        folder: The folder that is written.
        nbytes: What will be written, about.

    Raises:
        OSError: At the end of the context, if the disk refused something.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder = folder
        self._every = max(_EVERY_BYTES, nbytes // _MOST_TIMES)
        self._waiting = 0
        self._sizes: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(1, "sync")
        self._running: Future[None] | None = None

    def advance(self, nbytes: int) -> None:
        """Count bytes that were written; now and then the thread is sent after them.

        Args:
            nbytes: Since the last call.
        """
        self._waiting += nbytes
        if self._waiting >= self._every and (self._running is None or self._running.done()):
            self.start()

    def start(self) -> None:
        """Sync what has been written, behind what is being synced."""
        if self._running is not None and self._running.done():
            self._running.result()
        self._waiting = 0
        before = self._running
        self._running = self._pool.submit(self._sync, before)

    def __enter__(self) -> "Syncing":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None and self._running is not None:
            self._running.result()

    def _sync(self, before: "Future[None] | None") -> None:
        """Sync every file that has grown."""
        if before is not None:
            before.result()
        for folder, _, names in os.walk(self._folder):
            for path in (Path(folder, name) for name in names):
                try:
                    size = path.stat().st_size
                    if self._sizes.get(path) != size:
                        sync_file(path, only_data=True)
                        self._sizes[path] = size
                except FileNotFoundError:  # it has got its final name meanwhile
                    continue


def sync_file(path: Path, *, only_data: bool = False) -> None:
    """Bring a file to the disk.

    Args:
        path: The file.
        only_data: Whether its times may stay behind.
    """
    sync = os.fdatasync if only_data and hasattr(os, "fdatasync") else os.fsync
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)
