"""Tensors that are read by rows when wanted: the pieces from which readers and writers put tensors together.

A reader says what a canonical tensor is made of (a slice of one file, the ranks' shares side by side, one expert of a
stack), a writer what a stored tensor is made of. Nothing is read before :meth:`Lazy.rows`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from hp_muon_plugin.checkpoint import torch_archive
from hp_muon_plugin.checkpoint.canonical import Key, Source
from hp_muon_plugin.checkpoint.dcp_files import DcpFolder
from hp_muon_plugin.checkpoint.files import Files


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is not in memory.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read: Gives rows ``[start, stop)``, contiguous, free to be changed. A 0-dim tensor is read by ``(0, 1)``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    def rows(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of it on the CPU, contiguous.

        Args:
            start: First index of dimension 0.
            stop: One past the last; None for all that follow.
        """
        length = self.shape[0] if self.shape else 1
        return self.read(start, length if stop is None else min(stop, length))

    @property
    def numel(self) -> int:
        """Elements of it."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.numel * self.dtype.itemsize


def canonical(source: Source, key: Key) -> Lazy:
    """A tensor of an opened checkpoint."""
    info = source.tensors()[key]
    return Lazy(info.shape, info.dtype, lambda start, stop: source.read(key, start, stop))


def in_dcp(folder: DcpFolder, name: str) -> Lazy:
    """A tensor of a DCP folder."""
    tensor = folder.tensors[name]

    def read(start: int, stop: int) -> torch.Tensor:
        if not tensor.shape:
            return folder.read(name)
        rest = tensor.shape[1:]
        return folder.read(name, (start, *(0 for _ in rest)), (stop - start, *rest))

    return Lazy(tensor.shape, tensor.dtype, read)


def in_archive(files: Files, located: torch_archive.Located, what: str) -> Lazy:
    """A tensor of a torch.save archive, read in place."""
    stored = located.stored
    row_major = tuple(prod(stored.shape[dim + 1 :]) for dim in range(len(stored.shape)))

    def read(start: int, stop: int) -> torch.Tensor:
        if not stored.shape or stored.stride != row_major:
            whole = torch_archive.read_whole(files, located, what)
            return whole[start:stop].clone() if stored.shape else whole
        out = torch.empty((stop - start, *stored.shape[1:]), dtype=stored.dtype)
        torch_archive.fill(files, located, stored.offset + start * row_major[0], out.view(-1), what)
        return out

    return Lazy(stored.shape, stored.dtype, read)


def in_memory(tensor: torch.Tensor) -> Lazy:
    """A small tensor that is there already."""
    return Lazy(
        tuple(tensor.shape), tensor.dtype, lambda a, b: (tensor[a:b] if tensor.dim() else tensor).clone().contiguous()
    )


def cut_rows(whole: Lazy, start: int, stop: int) -> Lazy:
    """Rows ``[start, stop)``."""
    return Lazy((stop - start, *whole.shape[1:]), whole.dtype, lambda a, b: whole.read(start + a, start + b))


def cut_columns(whole: Lazy, start: int, stop: int) -> Lazy:
    """Part ``[start, stop)`` of dimension 1."""
    shape = (whole.shape[0], stop - start, *whole.shape[2:])
    return Lazy(shape, whole.dtype, lambda a, b: whole.read(a, b)[:, start:stop].contiguous())


def rows_of(parts: Sequence[Lazy]) -> Lazy:
    """Parts one below the other."""
    if len(parts) == 1:
        return parts[0]
    firsts = [0]
    for part in parts:
        firsts.append(firsts[-1] + part.shape[0])

    def read(start: int, stop: int) -> torch.Tensor:
        found = [
            part.read(max(start, first) - first, min(stop, first + part.shape[0]) - first)
            for part, first in zip(parts, firsts, strict=False)
            if max(start, first) < min(stop, first + part.shape[0])
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else parts[0].read(0, 0)

    return Lazy((firsts[-1], *parts[0].shape[1:]), parts[0].dtype, read)


def columns_of(parts: Sequence[Lazy]) -> Lazy:
    """Parts side by side along dimension 1."""
    if len(parts) == 1:
        return parts[0]
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), *parts[0].shape[2:])
    return Lazy(shape, parts[0].dtype, lambda a, b: torch.cat([part.read(a, b) for part in parts], dim=1))


def item_of(stack: Lazy, index: int) -> Lazy:
    """One item of a stack along dimension 0."""

    def read(start: int, stop: int) -> torch.Tensor:
        return stack.read(index, index + 1)[0][start:stop].contiguous()

    return Lazy(stack.shape[1:], stack.dtype, read)


def stack_of(items: Sequence[Lazy]) -> Lazy:
    """Items of one shape stacked along a new dimension 0."""
    return Lazy(
        (len(items), *items[0].shape),
        items[0].dtype,
        lambda a, b: torch.stack([item.rows() for item in items[a:b]]) if b > a else _empty(items[0], 0),
    )


def part_of_flat(flat: Lazy, first: int, shape: tuple[int, ...]) -> Lazy:
    """A tensor that lies row by row in a flat one, from element ``first`` on."""
    row = prod(shape[1:])

    def read(start: int, stop: int) -> torch.Tensor:
        if not shape:
            return flat.read(first, first + 1).reshape(())
        return flat.read(first + start * row, first + stop * row).view(stop - start, *shape[1:])

    return Lazy(shape, flat.dtype, read)


def flat_of(parts: Sequence[tuple[int, Lazy]], numel: int) -> Lazy:
    """A flat tensor in which tensors lie row by row from given elements on; zero elsewhere.

    Args:
        parts: First element and tensor, ascending.
        numel: Elements of the whole.
    """

    firsts, dtype = [first for first, _ in parts], parts[0][1].dtype

    def read(start: int, stop: int) -> torch.Tensor:
        out = None
        for first, part in parts[max(0, bisect_right(firsts, start) - 1) : bisect_left(firsts, stop)]:
            a, b = max(start, first), min(stop, first + part.numel)
            if a >= b:
                continue
            row = prod(part.shape[1:])
            top, bottom = (a - first) // row, -((first - b) // row)
            found = part.rows(top, bottom).reshape(-1)[a - first - top * row :][: b - a]
            if (a, b) == (start, stop) and found.dtype == dtype:
                return found  # mostly: a block is small beside a matrix
            out = torch.zeros(stop - start, dtype=dtype) if out is None else out
            out[a - start : b - start] = found
        return torch.zeros(stop - start, dtype=dtype) if out is None else out

    return Lazy((numel,), dtype, read)


def transposed(matrix: Lazy) -> Lazy:
    """A matrix the other way round. Its rows are read as columns, which costs a whole read of it."""
    shape = (matrix.shape[1], matrix.shape[0])
    return Lazy(shape, matrix.dtype, lambda a, b: matrix.rows()[:, a:b].t().contiguous())


def reshaped(whole: Lazy, shape: tuple[int, ...]) -> Lazy:
    """The same elements in another shape of the same length along dimension 0."""
    return Lazy(shape, whole.dtype, lambda a, b: whole.read(a, b).reshape(b - a, *shape[1:]))


def cast(whole: Lazy, dtype: torch.dtype) -> Lazy:
    """In another dtype."""
    return whole if whole.dtype == dtype else Lazy(whole.shape, dtype, lambda a, b: whole.read(a, b).to(dtype))


def scaled(whole: Lazy, factor: float) -> Lazy:
    """Times a number."""
    return whole if factor == 1 else Lazy(whole.shape, whole.dtype, lambda a, b: whole.read(a, b) * factor)


def padded(whole: Lazy, length: int) -> Lazy:
    """Cut or filled with zeros to ``length`` rows."""
    if length <= whole.shape[0]:
        return cut_rows(whole, 0, length)
    rest = (length - whole.shape[0], *whole.shape[1:])
    return rows_of([whole, Lazy(rest, whole.dtype, lambda a, b: torch.zeros((b - a, *rest[1:]), dtype=whole.dtype))])


def _empty(like: Lazy, rows: int) -> torch.Tensor:
    return torch.empty((rows, *like.shape), dtype=like.dtype)
