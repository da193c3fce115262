"""Checksums of storages, compared while they are read."""

import threading
from collections.abc import Callable

from isal.isal_zlib import crc32

from hp_muon_plugin.errors import DamageError

_GAP_BYTES = 2**16  # between two tensors of a buffer, and behind the last
_BLOCK_BYTES = 2**20
_LOCKS = tuple(threading.Lock() for _ in range(64))


def lock_of(thing: object) -> threading.Lock:
    """A lock for one of very many things, which some others share. It must not be held while another is taken.

    Locks of their own, made between blocks of tensors that come and go, lie in the allocator's free blocks, which then
    no longer hold a block: memory grew with the number of tensors.

    Args:
        thing: What is locked.
    """
    return _LOCKS[hash(thing) % len(_LOCKS)]


class Checksum:
    """The CRC-32 of a storage, computed while its bytes are read in order: a conversion reads most of them so.

    Threads may share it. What is read out of order is not followed, and read again by :meth:`finish`.

    Args:
        wanted: As the archive has it; 0 stands where torch was told to compute none, and is not compared.
        nbytes: Of the storage.
        what: File and tensor, for the message.
        read: Reads bytes of the storage, by place and number.
    """

    def __init__(self, wanted: int, nbytes: int, what: str, read: Callable[[int, int], bytes]) -> None:
        self._wanted, self._nbytes, self._what, self._read = wanted, nbytes, what, read
        self._lock = lock_of(self)
        self._at = self._crc = 0
        self._is_used = False
        self.is_compared = not wanted

    def note(self, first: int, found: memoryview) -> None:
        """Follow bytes that were read.

        Args:
            first: Place of the first in the storage.
            found: The bytes.

        Raises:
            CheckpointError: If all have been read, and are not those that were written.
        """
        with self._lock:
            self._is_used = True
            if self.is_compared:
                return
            if first == 0:
                self._at = self._crc = 0
            if not 0 <= first - self._at <= _GAP_BYTES:
                return
            self._read_to(first)
            self._crc = crc32(found, self._crc)
            self._at = first + len(found)
            if self._nbytes - self._at <= _GAP_BYTES:
                self._compare()

    def finish(self) -> None:
        """Compare, if anything was read at all."""
        with self._lock:
            if self._is_used and not self.is_compared:
                self._compare()

    def _compare(self) -> None:
        self._read_to(self._nbytes)
        self.is_compared = True
        if self._crc != self._wanted:
            raise DamageError(
                f"{self._what} is damaged: its bytes do not have the checksum that they were written with\n"
                "  fix: copy the file again from where it was saved"
            )

    def _read_to(self, stop: int) -> None:
        while self._at < stop:
            found = self._read(self._at, min(_BLOCK_BYTES, stop - self._at))
            self._crc = crc32(found, self._crc)
            self._at += len(found)
