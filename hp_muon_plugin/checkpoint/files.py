"""Files of a checkpoint folder, read by position: no memory maps, which would count as memory under a limit."""

import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Protocol

from hp_muon_plugin.errors import CheckpointError, DamageError

_MAX_OPEN = 64
_FORBIDDEN = (errno.EACCES, errno.EPERM)  # says nothing about the checkpoint


def safe_join(folder: Path, relative: str) -> Path:
    """Path of a file that a checkpoint names.

    Args:
        folder: Folder of the checkpoint.
        relative: Name as it stands in the checkpoint.

    Raises:
        CheckpointError: If the name leads out of the folder.
    """
    posix, windows = PurePosixPath(relative), PureWindowsPath(relative)
    absolute = posix.is_absolute() or windows.is_absolute() or windows.drive
    if not relative or absolute or ".." in posix.parts or ".." in windows.parts or "\0" in relative:
        raise CheckpointError(
            f"{folder}: its metadata names the file {relative!r}, which is not inside the folder\n"
            "  fix: do not use this checkpoint unless you know who wrote it"
        )
    return folder / relative


class Check(Protocol):
    """Compares something of a file with its checksum, when the rest of it has been read too."""

    def finish(self) -> None:
        """Read what is left, and compare.

        Raises:
            CheckpointError: If it is damaged.
        """
        ...


class Opened(Protocol):
    """Files that a source holds."""

    def compare_rest(self) -> None:
        """As :meth:`Files.compare_rest`."""
        ...

    def close(self) -> None:
        """Close them."""
        ...


class Files:
    """Files under one folder. Threads may share it.

    Args:
        folder: Folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._in_use: dict[str, int] = {}
        self._lock = threading.Lock()
        self._checks: list[Check] = []

    def size(self, relative: str, what: str = "") -> int:
        """Length of a file in bytes.

        Args:
            relative: Its name in the folder.
            what: What is looked for in it, for the message.

        Raises:
            CheckpointError: If it is not there.
        """
        try:
            return safe_join(self.folder, relative).stat().st_size
        except OSError as error:
            raise self._unreadable(relative, what, error) from error

    def read_into(self, relative: str, offset: int, buffer: memoryview, what: str = "") -> None:
        """Fill a buffer.

        Args:
            relative: Name of the file in the folder.
            offset: First byte.
            buffer: Writable bytes, one dimension.
            what: What is read, for the message.

        Raises:
            CheckpointError: If the file is missing or too short.
        """
        descriptor = self._acquire(relative, what)
        try:
            done = 0
            while done < len(buffer):
                try:
                    count = os.preadv(descriptor, [buffer[done:]], offset + done)
                except OSError as error:
                    raise self._unreadable(relative, what, error) from error
                if count == 0:
                    size = os.fstat(descriptor).st_size
                    raise DamageError(
                        f"{self.folder / relative} ends at byte {size}, but {what or 'its content'} "
                        f"needs bytes {offset} to {offset + len(buffer)}: the file is cut off\n"
                        "  fix: copy the file again from where it was saved"
                    )
                done += count
        finally:
            self._release(relative)

    def read(self, relative: str, offset: int, length: int, what: str = "") -> bytes:
        """Bytes of a file, as :meth:`read_into`."""
        buffer = bytearray(length)
        self.read_into(relative, offset, memoryview(buffer), what)
        return bytes(buffer)

    def follow(self, check: Check) -> None:
        """Have something finished by :meth:`compare_rest`."""
        with self._lock:
            self._checks.append(check)

    def compare_rest(self) -> None:
        """Compare what was read, but not in order, with its checksums: it is read again.

        Raises:
            CheckpointError: If it is damaged.
        """
        for check in list(self._checks):
            check.finish()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _acquire(self, relative: str, what: str) -> int:
        with self._lock:
            if relative in self._open:
                self._open.move_to_end(relative)
            else:
                try:
                    descriptor = os.open(safe_join(self.folder, relative), os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise self._unreadable(relative, what, error) from error
                self._open[relative] = descriptor
                self._close_idle()
            self._in_use[relative] = self._in_use.get(relative, 0) + 1
            return self._open[relative]

    def _release(self, relative: str) -> None:
        with self._lock:
            self._in_use[relative] -= 1
            if not self._in_use[relative]:
                del self._in_use[relative]

    def _close_idle(self) -> None:
        for relative in list(self._open)[:-1]:
            if len(self._open) <= _MAX_OPEN:
                return
            if relative not in self._in_use:
                os.close(self._open.pop(relative))

    def _unreadable(self, relative: str, what: str, error: OSError) -> CheckpointError:
        needed = f", which holds {what}" if what else ""
        kind = CheckpointError if error.errno in _FORBIDDEN else DamageError
        return kind(f"cannot read {self.folder / relative}{needed}: {error.strerror}")
