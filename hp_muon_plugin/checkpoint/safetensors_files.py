"""Files in the safetensors layout: a JSON header, then the tensors' bytes. Read and written by position."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.files import Files
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes
from hp_muon_plugin.checkpoint.writes import SharedFile, Writes
from hp_muon_plugin.errors import CheckpointError, DamageError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000


def read_header(files: Files, file: str) -> dict[str, Lazy]:
    """Tensors of a file.

    Args:
        files: Files of the checkpoint.
        file: Name in its folder.

    Raises:
        CheckpointError: If the header is damaged, or a tensor lies outside of the file.
    """
    where, size = files.folder / file, files.size(file)
    try:
        length = int.from_bytes(files.read(file, 0, 8), "little")
        if length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(files.read(file, 8, length))
        return {
            name: _tensor(files, file, name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(
            f"{where} is damaged or no safetensors file: {error}\n  fix: copy or download the file again"
        ) from error


def _tensor(files: Files, file: str, name: str, entry: Mapping[str, Any], first: int, size: int) -> Lazy:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
        raise ValueError(f"{name} of shape {shape} at bytes {begin} to {end}: these are no sizes")
    if end - begin != prod(shape) * dtype.itemsize or first + end > size:
        raise ValueError(f"{name} of shape {shape} at bytes {begin} to {end} does not fit the file")
    row = prod(shape[1:]) * dtype.itemsize

    def read(start: int, stop: int) -> torch.Tensor:
        out = torch.empty((stop - start, *shape[1:]) if shape else (), dtype=dtype)
        if out.numel():
            files.read_into(file, first + begin + start * row, raw_bytes(out), name)
        return out

    return Lazy(shape, dtype, read)


def write_file(
    path: Path,
    tensors: Mapping[str, Lazy],
    count: Callable[[int], None],
    jobs: int,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a file.

    Args:
        path: A new file.
        tensors: By name; read while they are written.
        count: Called with bytes of tensors as they are written, in any thread.
        jobs: Threads that read and write.
        metadata: Texts for the header.

    Raises:
        CheckpointError: If a dtype has no name in safetensors.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, which safetensors cannot hold")
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=0) as file, Writes(jobs) as writes:
        shared, place = SharedFile(file.fileno()), 8 + len(text)
        shared.write(0, len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            thread = writes.threads[writes.idlest]
            thread.put(partial(_copy, writes, tensor, count, shared, place), tensor.nbytes)
            place += tensor.nbytes


def _copy(writes: Writes, tensor: Lazy, count: Callable[[int], None], file: SharedFile, place: int) -> None:
    for block in writes.blocks(tensor, count):
        file.write(place, block)
        place += len(block)
