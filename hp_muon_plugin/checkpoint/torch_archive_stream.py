"""Archives of torch.save with many tensors, written one piece of a tensor after another."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32

from hp_muon_plugin.checkpoint import lazy
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.checkpoint.torch_archive_write import STORAGES
from hp_muon_plugin.checkpoint.writes import SharedFile, Writes
from hp_muon_plugin.checkpoint.zip_records import Record, directory

_ROOT = "archive"


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


def write_archive(path: Path, value: Any, count: Callable[[int], None], jobs: int = 1) -> None:
    """Write what ``torch.load`` reads.

    Args:
        path: A new file.
        value: Dicts, lists, plain values, tensors, and lazy tensors, which are read while they are written.
        count: Called with bytes of tensors as they are written, in any thread.
        jobs: Threads that read and write.
    """
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(value)
    contents: list[tuple[str, bytes | Lazy]] = [("data.pkl", described.getvalue()), ("byteorder", b"little")]
    contents += [(f"data/{number}", tensor) for number, tensor in enumerate(pickler.tensors)]
    contents += [("version", b"3\n")]
    sums: list[Future[int]] = []
    records: list[Record] = []
    with open(path, "xb", buffering=0) as file:
        shared = SharedFile(file.fileno())
        with Writes(jobs) as writes:
            for name, content in contents:
                nbytes = content.nbytes if isinstance(content, Lazy) else len(content)
                record = Record(f"{_ROOT}/{name}", nbytes, records[-1].end if records else 0)
                records.append(record)
                found = writes.blocks(content, count) if isinstance(content, Lazy) else [content]
                thread = writes.threads[writes.idlest]
                sums.append(thread.put(partial(_put, shared, record.content_at, found), nbytes))
        for record, crc in zip(records, sums, strict=True):
            record.crc = crc.result()
            shared.write(record.content_at - len(record.local()), record.local())
        shared.write(records[-1].end, directory(records))


def _put(file: SharedFile, place: int, found: Iterable[bytes | memoryview]) -> int:
    """Write blocks one after another. Gives their checksum."""
    crc = 0
    for block in found:
        crc = crc32(block, crc)
        file.write(place, block)
        place += len(block)
    return crc
