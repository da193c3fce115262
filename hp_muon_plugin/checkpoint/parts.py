"""What one rank writes of a tensor, or reads of it: chunks of the whole that are views of its own memory."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hp_muon_plugin.checkpoint.ranges import Chunk


class Part:
    """A rank's part of one stored tensor, as torch.distributed.checkpoint takes objects of its own.

    Args:
        name: Under which the tensor is stored.
        shape: Of the whole tensor.
        chunks: Boxes of the whole that the rank holds.
        held: Their elements, contiguous; of any shape.
        start: ``first`` of the element that ``held`` begins with.
    """

    def __init__(
        self, name: str, shape: Sequence[int], chunks: Iterable[Chunk], held: torch.Tensor, start: int = 0
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = held.dtype
        flat = held.detach().view(-1)
        self._views = {
            chunk.offsets: flat[chunk.first - start : chunk.first - start + math.prod(chunk.sizes)].view(chunk.sizes)
            for chunk in chunks
        }

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Part":
        """A tensor that this rank holds whole.

        Args:
            name: Under which it is stored.
            tensor: The tensor.

        Returns:
            Its only part.
        """
        shape = tuple(tensor.shape)
        return cls(name, shape, [Chunk((0,) * len(shape), shape, 0)], tensor.contiguous())

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's chunks."""
        return sum(view.numel() for view in self._views.values()) * self.dtype.itemsize

    @property
    def numel(self) -> int:
        """Elements of this rank's chunks."""
        return sum(view.numel() for view in self._views.values())

    def views(self) -> dict[tuple[int, ...], torch.Tensor]:
        """The chunks by their offsets; views of the rank's memory."""
        return dict(self._views)

    def view(self, index: MetadataIndex) -> torch.Tensor:
        """One chunk.

        Args:
            index: Its place, as planned by torch.

        Returns:
            A view of the rank's memory.
        """
        assert index.offset is not None, index
        return self._views[tuple(index.offset)]

    def replace(self, views: dict[tuple[int, ...], torch.Tensor]) -> None:
        """Let the chunks be other tensors of the same shapes, as copies.

        Args:
            views: By offsets.
        """
        assert views.keys() == self._views.keys(), self.name
        self._views = views

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(chunk.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(view.shape)) for offsets, view in self._views.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.view(index)
