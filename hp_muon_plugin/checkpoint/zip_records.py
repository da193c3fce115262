"""Records of a zip file around contents that are stored as they are, of any size, with all places known before."""

import struct
from collections.abc import Sequence

_ALIGNMENT = 64
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_FULL = 2**32 - 1  # "see the 64-bit field": what is as large or larger stands there
_MOST_RECORDS = 2**16 - 1
_FIRST_DAY = 33  # 1980-01-01
_LONG, _SHORT = 45, 20  # version that a reader needs, with and without 64-bit fields
_PADDING = 0x4246  # the field that torch pads with


class Record:
    """One file of the archive. Its content begins at a multiple of 64 bytes, as torch writes it.

    Args:
        name: ASCII.
        nbytes: Of the content.
        at: Where its header begins.

    Attributes:
        content_at: Where the content begins.
        end: One past it.
        crc: CRC-32 of the content; to be set before the headers are asked for.
    """

    def __init__(self, name: str, nbytes: int, at: int) -> None:
        self._name, self.nbytes, self._at = name.encode("ascii"), nbytes, at
        self._is_long = nbytes >= _FULL
        long = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if self._is_long else b""
        before = at + _LOCAL.size + len(self._name) + len(long) + 4
        padding = -before % _ALIGNMENT
        self._extra = long + struct.pack("<HH", _PADDING, padding) + b"Z" * padding
        self.content_at = before + padding
        self.end = self.content_at + nbytes
        self.crc = 0

    def local(self) -> bytes:
        """What stands before the content."""
        size, version = (_FULL, _LONG) if self._is_long else (self.nbytes, _SHORT)
        sizes = (size, size, len(self._name), len(self._extra))
        return _LOCAL.pack(0x04034B50, version, 0, 0, 0, _FIRST_DAY, self.crc, *sizes) + self._name + self._extra

    def central(self) -> bytes:
        """Its entry of the directory."""
        long = [self.nbytes, self.nbytes] if self._is_long else []
        long += [self._at] if self._at >= _FULL else []
        extra = struct.pack(f"<HH{len(long)}Q", 1, 8 * len(long), *long) if long else b""
        size, at = min(self.nbytes, _FULL), min(self._at, _FULL)
        version = _LONG if long else _SHORT
        head = (0x02014B50, version, version, 0, 0, 0, _FIRST_DAY, self.crc, size, size)
        return _CENTRAL.pack(*head, len(self._name), len(extra), 0, 0, 0, 0, at) + self._name + extra


def directory(records: Sequence[Record]) -> bytes:
    """What stands behind the last content.

    Args:
        records: All, in the order of their places.
    """
    listed = b"".join(record.central() for record in records)
    at, count, size = records[-1].end, len(records), len(listed)
    end64 = b""
    if at >= _FULL or size >= _FULL or count >= _MOST_RECORDS:
        end64 = _END64.pack(0x06064B50, _END64.size - 12, _LONG, _LONG, 0, 0, count, count, size, at)
        end64 += _LOCATOR.pack(0x07064B50, 0, at + size, 1)
    most = min(count, _MOST_RECORDS)
    return listed + end64 + _END.pack(0x06054B50, 0, 0, most, most, min(size, _FULL), min(at, _FULL), 0)
