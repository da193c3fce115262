"""Archives of torch.save written straight from a tensor's memory, byte by byte as torch.load reads them."""

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.checkpoint.hashing import AT_ONCE_BYTES
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes

_ALIGNMENT = 64
MAX_BYTES = 2**32 - 2**20
"""Payload that fits an archive without the 64-bit extension of zip."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_SUMS = struct.Struct("<IIII")
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

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        shape, reference = self._tensor.shape, _Reference(self._tensor.dtype, self._tensor.numel())
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (reference, 0, tuple(shape), stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Reference):
            return ("storage", STORAGES[value.dtype], "0", "cpu", value.numel)
        return None


def is_writable(dtype: torch.dtype) -> bool:
    """Whether :func:`tensor_parts` knows the dtype."""
    return dtype in STORAGES


def tensor_parts(tensor: torch.Tensor, pool: Executor) -> Iterator[bytes | memoryview]:
    """The archive of one tensor, in parts to be written one after another.

    Args:
        tensor: Contiguous, on the CPU, at most :data:`MAX_BYTES`. One part is its memory, uncopied.
        pool: Computes the checksum of the memory while it is written.

    Yields:
        The parts. Their lengths together are the length of the archive.
    """
    described = io.BytesIO()
    _Pickler(described, protocol=2).dump(_Described(tensor))
    entries: list[tuple[str, bytes | memoryview]] = [
        ("archive/data.pkl", described.getvalue()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
        ("archive/data/0", raw_bytes(tensor) if tensor.numel() else b""),
    ]
    content = entries[-1][1]
    checksum = pool.submit(zlib.crc32, content) if len(content) >= AT_ONCE_BYTES else None
    directory: list[bytes] = []
    at = 0
    for name, payload in entries:
        padding = -(at + _LOCAL.size + len(name) + 4) % _ALIGNMENT
        extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # the field that torch pads with
        head = (
            _LOCAL.pack(0x04034B50, 20, _SUMS_FOLLOW, 0, 0, 33, 0, 0, 0, len(name), len(extra)) + name.encode() + extra
        )
        yield head
        yield payload
        crc = checksum.result() if checksum is not None and payload is content else zlib.crc32(payload)
        length = len(payload)
        sums = _SUMS.pack(0x08074B50, crc, length, length)
        yield sums
        directory.append(
            _CENTRAL.pack(
                *(0x02014B50, 20, 20, _SUMS_FOLLOW, 0, 0, 33, crc, length, length, len(name), 0, 0, 0, 0, 0, at)
            )
            + name.encode()
        )
        at += len(head) + length + len(sums)
    listed = b"".join(directory)
    yield listed + _END.pack(0x06054B50, 0, 0, len(entries), len(entries), len(listed), at, 0)
