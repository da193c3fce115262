"""Archives of torch.save with many tensors, written one piece of a tensor after another."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.dcp_write import row_pieces
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive import raw_bytes
from hp_muon_plugin.checkpoint.torch_archive_write import STORAGES

_ALIGNMENT = 64
_ROOT = "archive"
_HEADER = 30  # bytes of a local file header before name and extra field
_ZIP64_EXTRA = 20
_BIG = 2**31


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles lazy tensors as torch does real ones, and remembers them in order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Lazy] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", STORAGES[value.dtype], value.key, "cpu", value.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = lazy.in_memory(value.detach().cpu().contiguous())
        if not isinstance(value, Lazy):
            return NotImplemented
        storage = _Storage(value.dtype, str(len(self.tensors)), value.numel)
        self.tensors.append(value)
        stride = tuple(prod(value.shape[dim + 1 :]) for dim in range(len(value.shape)))
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, stride, False, OrderedDict())


def write_archive(path: Path, value: Any, count: Callable[[int], None], chunk_bytes: int) -> None:
    """Write what ``torch.load`` reads.

    Args:
        path: A new file.
        value: Dicts, lists, plain values, tensors, and lazy tensors, which are read while they are written.
        count: Called with bytes of tensors as they are written.
        chunk_bytes: About how much of a tensor is read at a time.
    """
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(value)
    with open(path, "xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _put(archive, file, "data.pkl", described.getvalue())
        _put(archive, file, "byteorder", b"little")
        for number, tensor in enumerate(pickler.tensors):
            info = _entry(file, f"data/{number}", tensor.nbytes)
            with archive.open(info, "w", force_zip64=tensor.nbytes >= _BIG) as entry:
                for start, stop in row_pieces(tensor.shape, tensor.dtype.itemsize, chunk_bytes):
                    rows = tensor.rows(start, stop)
                    if rows.numel():
                        entry.write(raw_bytes(rows))
                    count(rows.nbytes)
        _put(archive, file, "version", b"3\n")


def _put(archive: zipfile.ZipFile, file: io.BufferedWriter, name: str, content: bytes) -> None:
    archive.writestr(_entry(file, name, len(content)), content)


def _entry(file: io.BufferedWriter, name: str, nbytes: int) -> zipfile.ZipInfo:
    """An entry whose content begins at a multiple of 64 bytes, as torch writes it."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    before = file.tell() + _HEADER + len(info.filename) + 4 + (_ZIP64_EXTRA if nbytes >= _BIG else 0)
    padding = -before % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info
