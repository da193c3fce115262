"""Archives of torch.save written straight from a tensor's memory, byte by byte as torch.load reads them."""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from isal.isal_zlib import crc32

_ALIGNMENT = 64
MAX_BYTES = 2**32 - 2**20
"""Payload that fits an archive without the 64-bit extension of zip."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_SUMS = struct.Struct("<IIII")
_CONTENT = "archive/data/0"
_SUMS_FOLLOW = 8  # flag: checksum and sizes stand behind the payload
_END = struct.Struct("<IHHHHIIH")
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.uint8: torch.ByteStorage,
    torch.int8: torch.CharStorage,
    torch.int16: torch.ShortStorage,
    torch.int32: torch.IntStorage,
    torch.int64: torch.LongStorage,
    torch.bool: torch.BoolStorage,
}


@dataclass(frozen=True)
class _Reference:
    dtype: torch.dtype
    numel: int


class _Described:
    """Pickles as the tensor would, with a reference in place of its storage."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self._dtype, self._shape = dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        shape, reference = self._shape, _Reference(self._dtype, self._shape.numel())
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (reference, 0, tuple(shape), stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Reference):
            return ("storage", STORAGES[value.dtype], "0", "cpu", value.numel)
        return None


def is_writable(dtype: torch.dtype) -> bool:
    """Whether :class:`TensorArchive` knows the dtype."""
    return dtype in STORAGES


class TensorArchive:
    """The archive of one tensor. Its length is known before the tensor is read.

    Args:
        dtype: Of the tensor.
        shape: Of the tensor, of at most :data:`MAX_BYTES`.

    Attributes:
        nbytes: Length of the archive.
    """

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self._length = shape.numel() * dtype.itemsize
        self._head, self._directory, self._first = _head(dtype, shape)
        self.nbytes = len(self._head) + self._length + len(self._tail(0))

    def parts(self, blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """What to write one after another.

        Args:
            blocks: The tensor's memory in order, from which the checksum is computed.
        """
        crc = 0
        yield self._head
        for block in blocks:
            crc = crc32(block, crc)
            yield block
        yield self._tail(crc)

    def _tail(self, crc: int) -> bytes:
        length = self._length
        sums = _SUMS.pack(0x08074B50, crc, length, length)
        entries = [*self._directory, (_CONTENT, crc, length, self._first)]
        listed = b"".join(
            _CENTRAL.pack(0x02014B50, 20, 20, _SUMS_FOLLOW, 0, 0, 33, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
            + name.encode()
            for name, crc, size, at in entries
        )
        begin = len(self._head) + length + len(sums)
        return sums + listed + _END.pack(0x06054B50, 0, 0, len(entries), len(entries), len(listed), begin, 0)


@lru_cache(maxsize=1024)
def _head(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, list[tuple[str, int, int, int]], int]:
    """All before the memory of a tensor, entries of the directory, and where the tensor's own entry begins."""
    described = io.BytesIO()
    _Pickler(described, protocol=2).dump(_Described(dtype, shape))
    head, directory = bytearray(), []
    for name, payload in (
        ("archive/data.pkl", described.getvalue()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    ):
        crc, length = crc32(payload), len(payload)
        directory.append((name, crc, length, len(head)))
        head += _local(name, len(head)) + payload + _SUMS.pack(0x08074B50, crc, length, length)
    first = len(head)
    return bytes(head + _local(_CONTENT, first)), directory, first


def _local(name: str, at: int) -> bytes:
    """The header of an entry at a place; its content comes at a multiple of 64 bytes, as torch writes it."""
    padding = -(at + _LOCAL.size + len(name) + 4) % _ALIGNMENT
    extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # the field that torch pads with
    local = _LOCAL.pack(0x04034B50, 20, _SUMS_FOLLOW, 0, 0, 33, 0, 0, 0, len(name), len(extra))
    return local + name.encode() + extra
