"""Directories of small zip files without compression, read off their last bytes.

A checkpoint has one such file for each chunk of a tensor, and :mod:`zipfile` takes longer to open one than the chunk
takes to be read. Whatever is not as torch writes it is left to :mod:`zipfile`.
"""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

_END = struct.Struct("<4s4xHHIIH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s20xQQQQ")
_CENTRAL = struct.Struct("<4s6xH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")
MAGIC = b"PK\3\4"
"""Begins a zip file, and each entry."""
_FULL = 2**32 - 1  # the value stands in the extra field
_FIELD = struct.Struct("<HH")
MAX_BYTES = 2**28
"""Largest directory or description that is read."""

BytesAt = Callable[[int, int], bytes]


class Entry(NamedTuple):
    """An entry of a zip file, with the names of :class:`zipfile.ZipInfo`."""

    filename: str
    compress_type: int
    CRC: int
    file_size: int
    header_offset: int


def entries(bytes_at: BytesAt, length: int) -> dict[str, Entry] | None:
    """The directory of a zip file.

    Args:
        bytes_at: Gives bytes of the file by first byte and number.
        length: Of the file.

    Returns:
        Entries by name; None if anything is unusual.
    """
    if length < _END.size:
        return None
    magic, _, count, size, start, comment = _END.unpack(bytes_at(length - _END.size, _END.size))
    if magic != b"PK\5\6" or comment:
        return None
    end = length - _END.size
    locator = end - _LOCATOR.size
    if locator >= _END_64.size:
        magic, place = _LOCATOR.unpack(bytes_at(locator, _LOCATOR.size))
        if magic == b"PK\6\7":
            if place + _END_64.size != locator:
                return None
            magic, _, count, size, start = _END_64.unpack(bytes_at(place, _END_64.size))
            end = place
            if magic != b"PK\6\6":
                return None
    if start + size != end or size > MAX_BYTES:
        return None
    return _directory(bytes_at(start, size), count, start)


def content(bytes_at: BytesAt, entry: Entry) -> bytes | None:
    """What an entry holds.

    Args:
        bytes_at: Gives bytes of the file by first byte and number.
        entry: The entry.

    Returns:
        Its bytes; None if they are compressed, or not those that were written.
    """
    first = content_start(bytes_at, entry)
    if first is None or entry.compress_type or entry.file_size > MAX_BYTES:
        return None
    found = bytes_at(first, entry.file_size)
    return found if entry.CRC in (0, zlib.crc32(found)) else None  # 0: torch was told to compute none


def content_start(bytes_at: BytesAt, entry: Entry) -> int | None:
    """Where the content of an entry begins, behind its own header.

    Args:
        bytes_at: Gives bytes of the file by first byte and number.
        entry: The entry.

    Returns:
        The first byte; None if there is no header.
    """
    magic, name, extra = _LOCAL.unpack(bytes_at(entry.header_offset, _LOCAL.size))
    return entry.header_offset + _LOCAL.size + int(name) + int(extra) if magic == MAGIC else None


def _directory(raw: bytes, count: int, limit: int) -> dict[str, Entry] | None:
    found: dict[str, Entry] = {}
    at = 0
    while at + _CENTRAL.size <= len(raw):
        magic, method, crc, packed, size, name, extra, comment, offset = _CENTRAL.unpack_from(raw, at)
        at += _CENTRAL.size
        filename = raw[at : at + name].decode("ascii", errors="replace")
        if _FULL in (size, packed, offset):
            size, packed, offset = _long(raw[at + name : at + name + extra], size, packed, offset)
        at += name + extra + comment
        if magic != b"PK\1\2" or size != packed or offset + _LOCAL.size + size > limit or filename in found:
            return None
        found[filename] = Entry(filename, method, crc, size, offset)
    return found if at == len(raw) and len(found) == count else None


def _long(extra: bytes, *values: int) -> list[int]:
    """Values of which some are in the extra field: uncompressed size, compressed size, offset."""
    at = 0
    while at + _FIELD.size <= len(extra):
        kind, length = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if kind == 1 and at + length <= len(extra):
            long = iter(struct.unpack_from(f"<{length // 8}Q", extra, at))
            return [next(long, value) if value == _FULL else value for value in values]
        at += length
    return list(values)
