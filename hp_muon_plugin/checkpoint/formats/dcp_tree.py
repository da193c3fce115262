"""Writing a nested state dict to a DCP folder, tensor by tensor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.dcp_write import DcpWriter, waiting_bytes
from hp_muon_plugin.checkpoint.hashing import piece_bytes
from hp_muon_plugin.checkpoint.lazy import Lazy


@contextmanager
def dcp_tree(folder: Path, target: Target, count: Callable[[int], None], budget: int) -> Iterator["DcpTree"]:
    """A folder to write to; it gets its metadata at the end, and none after an error.

    Args:
        folder: An empty folder.
        target: How large files are.
        count: Called with bytes of tensors as they are written, in any thread.
        budget: Bytes of tensors to hold at a time.

    Yields:
        The tree.
    """
    with DcpWriter(folder, target.shard_bytes, None, waiting_bytes(budget), target.jobs) as writer:
        tree = DcpTree(writer, count, budget)
        yield tree
        writer.close(tree.paths)


class DcpTree:
    """Writes leaves of a nested state dict under flat keys, and keeps their paths as torch's planner does.

    Args:
        writer: Of the folder.
        count: Called with bytes of tensors as they are written, in any thread.
        budget: Bytes of tensors to hold at a time.

    Attributes:
        paths: Path of each key that was written.
    """

    def __init__(self, writer: DcpWriter, count: Callable[[int], None], budget: int) -> None:
        self.paths: dict[str, tuple[Any, ...]] = {}
        self._writer = writer
        self._count = count
        self._chunk_bytes = piece_bytes(budget)

    def tensor(self, path: tuple[Any, ...], value: Lazy) -> None:
        """Write a tensor, in as many chunks as memory asks for."""
        key = self._key(path)
        self._writer.declare(key, value.shape, value.dtype)
        self._writer.copy(key, value, self._count, self._chunk_bytes)

    def value(self, path: tuple[Any, ...], value: Any) -> None:
        """Write a byte object."""
        self._writer.add_object(self._key(path), value)

    def nested(self, path: tuple[Any, ...], value: Any) -> None:
        """Write all leaves of dicts; tensors as tensors, anything else as byte objects."""
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self.nested((*path, key), item)
        elif isinstance(value, torch.Tensor):
            self._writer.add(self._key(path), value.contiguous())
        else:
            self.value(path, value)

    def _key(self, path: tuple[Any, ...]) -> str:
        key = ".".join(str(part) for part in path)
        self.paths[key] = path
        return key
