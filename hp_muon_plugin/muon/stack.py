"""What goes into the iteration and where its result goes, and cutting both into chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.muon.limits import chunk_limit


@dataclass(frozen=True, slots=True)
class Target:
    """Where the last product goes: ``tensor <- keep * tensor + scale * O``.

    Attributes:
        tensor: ``(B, M, N)``, one entry per matrix; or ``(G, M / G, N)``, the rows of a single
            matrix in ``G`` blocks. Any strides and floating type.
        first: Index of the first matrix in its stack.
        count: Matrices; with row blocks 1.
        keep: Factor of the old value; 0 overwrites it, whatever it is.
        scale: Factor of the polar factor.
    """

    tensor: torch.Tensor
    first: int
    count: int
    keep: float = 0.0
    scale: float = 1.0

    def chosen(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's own of a stack's matrices.

        Args:
            x: ``(B, M, N)`` of the whole stack.
            q: ``(B, m, m)`` of the whole stack.

        Returns:
            ``count`` of each.
        """
        if self.first or self.count != x.shape[0]:
            own = slice(self.first, self.first + self.count)
            return x[own], q[own]
        return x, q

    def factors(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The two factors of the last product and its input, shaped for :attr:`tensor`.

        Args:
            x: ``(B, M, N)`` of the whole stack.
            q: ``(B, m, m)`` of the whole stack.

        Returns:
            Left, right and the matrices themselves, all with the leading size of :attr:`tensor`.
        """
        is_wide = x.shape[1] <= x.shape[2]
        x, q = self.chosen(x, q)
        left, right = (q, x) if is_wide else (x, q.mT)
        blocks = self.tensor.shape[0]
        if blocks == self.count:
            return left, right, x
        assert self.count == 1, (self.tensor.shape, self.count)
        in_blocks = x[0].unflatten(0, (blocks, -1))
        return left[0].unflatten(0, (blocks, -1)), right.expand(blocks, -1, -1), in_blocks


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of one shape and where their polar factors go.

    Attributes:
        x: ``(B, M, N)``, floating point, any strides; not changed unless ``is_scratch``.
        targets: They cover every matrix once.
        is_scratch: Whether ``x`` may be overwritten with a scaled copy of itself.
    """

    x: torch.Tensor
    targets: tuple[Target, ...]
    is_scratch: bool = False

    @property
    def short(self) -> int:
        """The short side."""
        return min(self.x.shape[1:])


def chunks(
    stacks: Sequence[Stack], max_bytes: int | None, device: torch.device, *, itemsize: int
) -> Sequence[Sequence[Stack]]:
    """Cut stacks so that the small matrices of a chunk fit; targets are cut with them.

    Args:
        stacks: Not empty.
        max_bytes: Limit for ``16 B m^2``; None for the device's default.
        device: Where they live.
        itemsize: Bytes of a number in products.

    Returns:
        Lists of stacks with at least one matrix each.
    """
    short = max([stack.short for stack in stacks])
    limit = chunk_limit(device.type, short, itemsize=itemsize, num_threads=torch.get_num_threads(), max_bytes=max_bytes)
    if sum([stack.x.shape[0] for stack in stacks]) <= limit:
        return [stacks]
    return list(_cut(stacks, limit))


def _cut(stacks: Sequence[Stack], limit: int) -> Iterator[list[Stack]]:
    chunk: list[Stack] = []
    room = limit
    for stack in stacks:
        first, count = 0, stack.x.shape[0]
        while first < count:
            taken = min(room, count - first)
            chunk.append(_slice(stack, first, taken))
            first, room = first + taken, room - taken
            if room == 0:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk


def _slice(stack: Stack, first: int, count: int) -> Stack:
    if first == 0 and count == stack.x.shape[0]:
        return stack
    targets = []
    for target in stack.targets:
        start, stop = max(first, target.first), min(first + count, target.first + target.count)
        if start >= stop:
            continue
        whole = stop - start == target.count
        tensor = target.tensor if whole else target.tensor[start - target.first : stop - target.first]
        targets.append(Target(tensor, start - first, stop - start, target.keep, target.scale))
    return Stack(stack.x[first : first + count], tuple(targets), stack.is_scratch)
