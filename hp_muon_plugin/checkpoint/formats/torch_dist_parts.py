"""How a canonical tensor is read from a Megatron checkpoint: out of a stack, out of fragments, out of a flat bucket."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.lazy import Lazy
from hp_muon_plugin.errors import DamageError


class Part(Protocol):
    """Reads one canonical tensor."""

    @property
    def key(self) -> str:
        """Key that it is read from."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the canonical tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    def read(self, folder: DcpFolder, start: int, stop: int) -> torch.Tensor:
        """Rows of dimension 0; a 0-dim tensor whole."""
        ...


@dataclass(frozen=True, slots=True)
class Stacked:
    """A slice of a stack.

    Attributes:
        key: Key of the stack.
        index: Index in its leading dimensions.
        shape: Of the slice.
        dtype: Its dtype.
    """

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, folder: DcpFolder, start: int, stop: int) -> torch.Tensor:
        """Rows of the slice."""
        if not self.shape:
            return folder.read(self.key, self.index, (1,) * len(self.index)).reshape(())
        sizes = (stop - start, *self.shape[1:])
        offsets = (*self.index, start, *(0 for _ in self.shape[1:]))
        return folder.read(self.key, offsets, (*(1 for _ in self.index), *sizes)).reshape(sizes)


@dataclass(frozen=True, slots=True)
class Fragmented:
    """A slice of ``fully_sharded_model_space``: ``(*fragments along each axis, elements of one fragment)``.

    Attributes:
        key: Key of the tensor.
        index: Index in the leading dimensions of the original shape.
        shape: Of the slice.
        dtype: Its dtype.
        cuts: Number of fragments along each dimension of the slice.
    """

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[int, ...]

    def read(self, folder: DcpFolder, start: int, stop: int) -> torch.Tensor:
        """Rows of the slice."""
        if not self.shape:
            return folder.read(self.key).reshape(())
        local = tuple(length // cut for length, cut in zip(self.shape, self.cuts, strict=True))
        out = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        row = prod(local[1:])
        for block in range(start // local[0], -(-stop // local[0])) if local[0] else ():
            first, last = max(start, block * local[0]), min(stop, (block + 1) * local[0])
            flat = ((first - block * local[0]) * row, (last - first) * row)
            for rest in _grid(self.cuts[1:]):
                where = (*self.index, block, *rest)
                data = folder.read(self.key, (*where, flat[0]), (*(1 for _ in where), flat[1]))
                columns = tuple(slice(i * n, (i + 1) * n) for i, n in zip(rest, local[1:], strict=True))
                out[(slice(first - start, last - start), *columns)] = data.view(last - first, *local[1:])
        return out


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of flat buffers, or several of tensor-parallel ranks put together.

    Attributes:
        key: Key of the buffer; of the first one.
        first: First element in it.
        lazy: The tensor.
    """

    key: str
    first: int
    lazy: Lazy

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.lazy.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.lazy.dtype

    def read(self, folder: DcpFolder, start: int, stop: int) -> torch.Tensor:
        """Rows of the tensor."""
        return self.lazy.rows(start, stop)


def fragments(key: str, stored: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...]:
    """Number of fragments along every axis of the original shape.

    Args:
        key: Name, for the message.
        stored: Shape in the checkpoint.
        original: Shape of the model's tensor, with its stacks.

    Raises:
        CheckpointError: If the shapes do not belong together.
    """
    cuts = stored[:-1]
    fits = len(cuts) == len(original) and all(
        cut and length % cut == 0 for length, cut in zip(original, cuts, strict=True)
    )
    if not fits or prod(stored) != prod(original):
        raise DamageError(f"{key} of shape {stored} is no cut of a tensor of shape {original}")
    return cuts


def _grid(cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for cut in cuts:
        found = [(*place, index) for place in found for index in range(cut)]
    return found
