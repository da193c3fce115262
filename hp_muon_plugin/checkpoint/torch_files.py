"""torch.distributed.checkpoint for our parts: planners that know :class:`Part`, a reader that trusts no pickle."""

import functools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hp_muon_plugin.checkpoint.manifest import Manifest
from hp_muon_plugin.checkpoint.parts import Part
from hp_muon_plugin.errors import CheckpointError, DamageError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata")),
    *((f"{_DCP}.metadata", name) for name in ("MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class SavePlanner(DefaultSavePlanner):
    """Plans the writing of parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk of an index."""
        part: Part = self.state_dict[index.fqn]
        return part.view(index)


class ReadPlanner(DefaultLoadPlanner):
    """Plans the reading of parts, each element of which must be stored."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take what is to be read, and what is stored."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan, and count.

        Raises:
            CheckpointError: If some elements of a tensor are stored nowhere.
        """
        plan = super().create_local_plan()
        read = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            read[item.dest_index.fqn] += math.prod(item.lengths)
        for name, count in read.items():
            if count != self.state_dict[name].numel:
                raise DamageError(
                    f"{name}: {count} of {self.state_dict[name].numel} elements that this rank needs are stored\n"
                    "  fix: the checkpoint is damaged; take another one"
                )
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk of an index."""
        part: Part = self.state_dict[index.fqn]
        return part.view(index)


class Writer(FileSystemWriter):
    """Files of one rank, brought to the disk before a write counts as done."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, overwrite=True)


class Reader(FileSystemReader):
    """Reads what a manifest names. Every stored chunk is read once, in the order of the file.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder, self._manifest = folder, manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata`` without running code from it.

        Raises:
            CheckpointError: If it is damaged, wants something else than metadata classes, or names other files
                and tensors than the manifest does.
        """
        path = self._folder / METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            self._check(metadata)
        except CheckpointError as error:
            raise type(error)(f"{path}: {error}") from error
        except Exception as error:  # whatever a damaged pickle makes the unpickler do
            raise DamageError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        assert isinstance(metadata, Metadata)
        return metadata

    def _check(self, metadata: Metadata) -> None:
        named: Mapping[str, Any] = metadata.state_dict_metadata
        for name, info in self._manifest.tensors.items():
            if name not in named or tuple(named[name].size) != info.shape:
                raise DamageError(f"does not describe {name} of the manifest")
        for index, stored in metadata.storage_data.items():
            file = self._manifest.files.get(str(stored.relative_path))
            if file is None or not 0 <= stored.offset <= stored.offset + stored.length <= file.nbytes:
                raise DamageError(f"places {index.fqn} outside of the files of the manifest")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read planned items.

        Raises:
            CheckpointError: If a chunk cannot be read, naming file and tensor.
        """
        found = [(self.storage_data[item.storage_index], item) for item in plan.items]
        found.sort(key=lambda pair: (str(pair[0].relative_path), pair[0].offset))
        place: tuple[str, int] | None = None
        chunk = torch.empty(0)
        for stored, item in found:
            if place != (stored.relative_path, stored.offset):
                place, chunk = (stored.relative_path, stored.offset), self._chunk(stored, item)
            _deliver(chunk, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, stored: Any, item: ReadItem) -> torch.Tensor:
        path = self._folder / stored.relative_path
        try:
            with path.open("rb") as file:
                chunk = torch.load(self._slice_file(file, stored), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises RuntimeError, UnpicklingError and others
            raise DamageError(
                f"{path}: {item.storage_index.fqn} at byte {stored.offset} cannot be read "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            ) from error
        assert isinstance(chunk, torch.Tensor)
        return chunk


def _deliver(chunk: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(chunk)
    planner.commit_tensor(item, target)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of ``.metadata`` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise CheckpointError(f"its pickle wants {module}.{name}, which no checkpoint needs; nothing was run")


@functools.cache
def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
