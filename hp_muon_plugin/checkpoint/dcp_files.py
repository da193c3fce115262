"""Folders of torch.distributed.checkpoint, read without a process group and without running their pickles.

A tensor there is a set of chunks, each a torch.save archive inside a ``.distcp`` file. Any box of it can be read;
only the bytes that lie between the first and the last element of it in each chunk are touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.boxes import Box, BoxIndex, overlapping
from hp_muon_plugin.checkpoint.files import Files, safe_join
from hp_muon_plugin.checkpoint.safe_pickle import StandIn, Stored, load_metadata
from hp_muon_plugin.checkpoint.zip_directory import MAGIC
from hp_muon_plugin.errors import CheckpointError, DamageError

METADATA = ".metadata"
_WASTE = 2**16  # bytes that may be read beyond what is wanted rather than seek
_NAMED = 8  # problems that a message names


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one item in a file."""

    file: str
    start: int
    length: int


@dataclass(slots=True)
class DcpTensor:
    """A tensor of the folder.

    Attributes:
        shape: Whole shape.
        dtype: Its dtype.
        boxes: What each chunk covers; empty chunks are left out.
        pieces: Where each lies; None if the metadata names no place.
        index: Finds chunks; made when the tensor is read first.
        last: Chunk that a whole box was read from last.
        located: Places of the chunks that have been read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]
    pieces: list[Piece | None]
    index: BoxIndex | None = None
    last: int | None = None
    located: dict[int, torch_archive.Located] = field(default_factory=dict)


class DcpFolder:
    """An opened folder. Threads may share it.

    Args:
        path: The folder with ``.metadata``.

    Attributes:
        tensors: By key.
        objects: Byte objects by key.
        metadata: The whole metadata as stand-ins (``planner_data``, ``mcore_data``).

    Raises:
        CheckpointError: If the metadata is missing, damaged or unsafe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = Files(path)
        raw = self.files.read(METADATA, 0, self.files.size(METADATA), "the metadata of the checkpoint")
        self.metadata: Any = load_metadata(raw, str(path / METADATA))
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, Piece | None] = {}
        try:
            self._read_metadata()
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise DamageError(f"{path / METADATA} is damaged: {error}") from error

    def _read_metadata(self) -> None:
        places: dict[tuple[str, tuple[int, ...] | None], Piece] = {}
        for file in {info.relative_path for info in self.metadata.storage_data.values()}:
            safe_join(self.path, file)
        for index, info in self.metadata.storage_data.items():
            if vars(info).get("transform_descriptors"):
                raise CheckpointError(f"{self.path}: {index.fqn} is stored compressed or encrypted, which is not read")
            offset = vars(index).get("offset")
            key = (index.fqn, None if offset is None else tuple(offset))
            places[key] = Piece(info.relative_path, int(info.offset), int(info.length))
        for name, item in self.metadata.state_dict_metadata.items():
            if not isinstance(item, StandIn) or item.class_name.endswith("BytesStorageMetadata"):
                self.objects[name] = places.get((name, None))
                continue
            boxes, pieces = [], []
            for chunk in item.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                if box.numel:
                    boxes.append(box)
                    pieces.append(places.get((name, box.offsets)))
            self.tensors[name] = DcpTensor(tuple(item.size), _dtype(item.properties), boxes, pieces)

    @property
    def planner_data(self) -> Mapping[str, Any]:
        """Path of each flat key in the nested state dict, if torch's planner wrote it."""
        return vars(self.metadata).get("planner_data") or {}

    def problems(self) -> list[str]:
        """Faults that show without reading tensors: missing or short files, chunks that overlap or leave holes."""
        found: dict[str, None] = {}
        sizes: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            for problem in self._tensor_problems(name, tensor):
                found[problem] = None
            for piece in tensor.pieces:
                found.update(dict.fromkeys(self._piece_problems(name, piece, sizes)))
        for name, piece in self.objects.items():
            found.update(dict.fromkeys(self._piece_problems(name, piece, sizes)))
        return list(found)

    @staticmethod
    def refuse(problems: Sequence[str]) -> None:
        """Name the first problems. A file that is cut off has one for each of its tensors, of which there are many.

        Args:
            problems: As of :meth:`problems`.

        Raises:
            CheckpointError: If there is any.
        """
        if problems:
            more = len(problems) - _NAMED
            rest = [f"and {more} more of this kind"] if more > 0 else []
            fix = "  fix: copy the checkpoint again from where it was saved"
            raise DamageError("\n".join([*problems[:_NAMED], *rest, fix]))

    def _tensor_problems(self, name: str, tensor: DcpTensor) -> list[str]:
        for box in tensor.boxes:
            if len(box.offsets) != len(tensor.shape) or any(
                a < 0 or a + n > total for a, n, total in zip(box.offsets, box.sizes, tensor.shape, strict=True)
            ):
                return [f"{self.path}: a chunk of {name} lies outside of its shape {tensor.shape}"]
        both = overlapping(tensor.boxes)
        if both:
            first, second = (tensor.boxes[index].offsets for index in both)
            return [f"{self.path}: chunks of {name} at {first} and {second} overlap"]
        missing = prod(tensor.shape) - sum(box.numel for box in tensor.boxes)
        return [f"{self.path}: {missing} elements of {name} are in no file"] if missing else []

    def _piece_problems(self, name: str, piece: Piece | None, sizes: dict[str, int]) -> list[str]:
        if piece is None:
            return [f"{self.path}: the metadata names no file for a part of {name}"]
        try:
            if piece.file not in sizes:
                sizes[piece.file] = self.files.size(piece.file, name)
        except CheckpointError as error:
            return [str(error)]
        if piece.start + piece.length > sizes[piece.file]:
            return [
                f"{self.path / piece.file} ends at byte {sizes[piece.file]}, but {name} needs bytes {piece.start} to "
                f"{piece.start + piece.length}: the file is cut off"
            ]
        return []

    def object(self, name: str) -> Any:
        """A byte object, unpickled safely; raw bytes if it is no archive.

        Args:
            name: Its key.

        Raises:
            CheckpointError: If it is missing, damaged or unsafe.
        """
        piece = self.objects.get(name)
        if piece is None:
            raise DamageError(f"{self.path} has no object {name}")
        if self.files.read(piece.file, piece.start, min(4, piece.length), name) != MAGIC:
            return self.files.read(piece.file, piece.start, piece.length, name)
        return torch_archive.load(self.files, piece.file, piece.start, piece.length, name)

    def read(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Read a box of a tensor.

        Args:
            name: Key of the tensor.
            offsets: First index in every dimension; None for the origin.
            sizes: Lengths; None for all that follow.

        Returns:
            The box on the CPU, contiguous, dtype as stored.

        Raises:
            CheckpointError: If a part is missing, damaged, or there twice.
        """
        tensor = self.tensors[name]
        start = tuple(offsets) if offsets is not None else (0,) * len(tensor.shape)
        lengths = tuple(sizes) if sizes is not None else tuple(a - b for a, b in zip(tensor.shape, start, strict=True))
        box = Box(start, lengths)
        out = torch.empty(box.sizes, dtype=tensor.dtype)
        if not box.numel:
            return out
        if tensor.index is None:
            if overlapping(tensor.boxes):
                raise DamageError(f"{self.path}: chunks of {name} overlap")
            tensor.index = BoxIndex(tensor.boxes)
        last = tensor.last
        if last is not None and tensor.boxes[last].contains(box):  # rows are mostly read in order, many from one chunk
            self._fill(out, name, tensor, last, box.within(tensor.boxes[last].offsets))
            return out
        meeting = tensor.index.meeting(box)
        common = [part for index in meeting if (part := tensor.boxes[index].meets(box))]
        missing = box.numel - sum(part.numel for part in common)
        if missing:
            raise DamageError(f"{self.path}: {missing} elements of {name} are in no file")
        for index, part in zip(meeting, common, strict=True):
            target = part.within(box.offsets)
            view = out[tuple(slice(a, a + n) for a, n in zip(target.offsets, target.sizes, strict=True))]
            self._fill(view, name, tensor, index, part.within(tensor.boxes[index].offsets))
        if len(meeting) == 1:
            tensor.last = meeting[0]
        return out

    def compare_rest(self) -> None:
        """As :meth:`Files.compare_rest`."""
        self.files.compare_rest()

    def close(self) -> None:
        """Close files."""
        self.files.close()

    def _located(self, name: str, tensor: DcpTensor, index: int) -> torch_archive.Located:
        located = tensor.located.get(index)
        if located is not None:
            return located
        piece = tensor.pieces[index]
        if piece is None:
            raise DamageError(f"{self.path}: the metadata names no file for a part of {name}")
        archive = torch_archive.Archive(self.files, piece.file, piece.start, piece.length, name)
        stored, box = archive.value, tensor.boxes[index]
        if not isinstance(stored, Stored) or stored.shape != box.sizes or stored.dtype != tensor.dtype:
            raise DamageError(
                f"{self.path / piece.file} holds something else for {name} at {box.offsets} than a {tensor.dtype} of "
                f"shape {box.sizes}"
            )
        tensor.located[index] = located = archive.located(stored)
        return located

    def _fill(self, out: torch.Tensor, name: str, tensor: DcpTensor, index: int, part: Box) -> None:
        """Read ``part`` of a chunk, in the chunk's coordinates, into a view of the same shape."""
        located = self._located(name, tensor, index)
        stride = located.stored.stride
        first = located.stored.offset + sum(a * step for a, step in zip(part.offsets, stride, strict=True))
        self._fill_from(out, name, located, first, stride)

    def _fill_from(
        self, out: torch.Tensor, name: str, located: torch_archive.Located, first: int, stride: tuple[int, ...]
    ) -> None:
        span = 1 + sum((length - 1) * step for length, step in zip(out.shape, stride, strict=True))
        if span == out.numel() and out.is_contiguous() and _row_major(out.shape, stride):
            torch_archive.fill(self.files, located, first, out.view(-1), name)
        elif out.dim() < 2 or span * out.dtype.itemsize <= _WASTE or span <= 2 * out.numel():
            flat = torch.empty(span, dtype=out.dtype)
            torch_archive.fill(self.files, located, first, flat, name)
            out.copy_(flat.as_strided(out.shape, stride))
        else:
            for row in range(out.shape[0]):
                self._fill_from(out[row], name, located, first + row * stride[0], stride[1:])


def _row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _dtype(properties: Any) -> torch.dtype:
    state = vars(properties).get("state")
    dtype = state[0] if isinstance(state, tuple) else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}")
    return dtype
