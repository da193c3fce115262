"""A bucket: whole parameters one after another in one flat buffer that ranks share in equal ranges.

The range of shard i is ``[i * shard_numel, (i + 1) * shard_numel)``. So one all-gather of the ranges
fills the buffer, each parameter is a contiguous view of it, and one reduce-scatter reads the buffer of
gradients. Where a range ends inside a parameter it cuts between two of the parameter's atoms: rows of
a weight, whole matrices of stacked experts. bucket_planner.py chooses the places.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hp_muon_plugin.layout.cuts import Cuts


def round_up(count: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not below ``count``.

    Args:
        count: Elements.
        step: What the result is a multiple of.

    Returns:
        The multiple.
    """
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter to place.

    Attributes:
        name: Its name, unique among the pieces of a plan.
        shape: Its shape; scalars and empty parameters are welcome.
        atom: Elements between two places where a shard may end: the row length of a weight, a whole
            matrix of stacked experts, 1 for norms and biases. Divides the number of elements.
        is_hard: Never cut an atom. A soft atom is cut where keeping it whole costs too much padding.
    """

    name: str
    shape: tuple[int, ...]
    atom: int
    is_hard: bool

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    def check(self) -> None:
        """Assert that atoms make up the parameter."""
        assert self.atom >= 1, self
        assert self.numel % self.atom == 0, self


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one parameter lies in the buffer.

    Attributes:
        name: Its name.
        shape: Its shape.
        offset: Its first element in the buffer.
        numel: Its elements.
        atom: The atom that shard ends keep whole; 1 if the soft atom of the piece is cut.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    atom: int

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.offset + self.numel


class ShardPiece(NamedTuple):
    """What one shard holds of one parameter.

    Attributes:
        placement: The parameter.
        start: First element, counted within the parameter.
        stop: The element after the last one, counted within the parameter.
        offset_in_shard: Where ``start`` lies in the shard.
    """

    placement: Placement
    start: int
    stop: int
    offset_in_shard: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A planned bucket.

    Attributes:
        num_shards: Ranks that share the buffer.
        shard_numel: Elements of each range.
        placements: The parameters, in buffer order.
    """

    num_shards: int
    shard_numel: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.num_shards * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return self.numel - sum(placement.numel for placement in self.placements)

    @property
    def padding_share(self) -> float:
        """Padding as a share of the buffer."""
        return self.padding / self.numel

    @property
    def aligned_numel(self) -> int:
        """Elements of parameters of which every shard holds whole rows or whole matrices."""
        return sum(placement.numel for placement in self.placements if placement.atom > 1)

    def placement(self, key: str | int) -> Placement:
        """One parameter. A name is searched for, so index where it matters.

        Args:
            key: Its name or its place in ``placements``.

        Returns:
            Its placement.
        """
        if isinstance(key, int):
            return self.placements[key]
        return next(placement for placement in self.placements if placement.name == key)

    def span(self, key: str | int, shard_index: int) -> tuple[int, int]:
        """The elements of a parameter that one shard holds.

        Args:
            key: Name of the parameter or its place in ``placements``.
            shard_index: The shard.

        Returns:
            ``(start, stop)`` counted within the parameter; equal if the shard holds none of it. The
            spans of shards 0, 1, ... follow one another from 0 to the end of the parameter.
        """
        assert 0 <= shard_index < self.num_shards, (shard_index, self.num_shards)
        placement = self.placement(key)
        first = shard_index * self.shard_numel - placement.offset
        last = first + self.shard_numel
        return min(max(first, 0), placement.numel), min(max(last, 0), placement.numel)

    def cuts(self, key: str | int) -> Cuts:
        """The elements of a parameter that every shard holds.

        Args:
            key: Name of the parameter or its place in ``placements``.

        Returns:
            Shard i holds those from ``cuts[i]`` to ``cuts[i + 1]``, as :meth:`span` says.
        """
        placement = self.placement(key)
        if not placement.numel:
            return Cuts(self.num_shards, 0, (0,))
        first = placement.offset // self.shard_numel
        inside = range((first + 1) * self.shard_numel, placement.stop, self.shard_numel)
        return Cuts(self.num_shards, first, (0, *(end - placement.offset for end in inside), placement.numel))

    def place_in_shard(self, key: str | int, shard_index: int) -> int:
        """Where the elements of a parameter that one shard holds lie in it.

        Args:
            key: Name of the parameter or its place in ``placements``.
            shard_index: The shard.

        Returns:
            First element in the shard; 0 if it holds none of it.
        """
        start, stop = self.span(key, shard_index)
        return self.placement(key).offset + start - shard_index * self.shard_numel if stop > start else 0

    def shard_pieces(self, shard_index: int) -> tuple[ShardPiece, ...]:
        """Everything one shard holds, in buffer order.

        Args:
            shard_index: The shard.

        Returns:
            The parts of parameters, none of them empty; no parts if the shard is all padding.
        """
        first = shard_index * self.shard_numel
        # Only the placement that starts last at or before the shard, and those after it, can reach into it.
        index = max(bisect_right(self.placements, first, key=lambda placement: placement.offset) - 1, 0)
        pieces = []
        while index < len(self.placements) and self.placements[index].offset < first + self.shard_numel:
            start, stop = self.span(index, shard_index)
            placement = self.placements[index]
            if start < stop:
                pieces.append(ShardPiece(placement, start, stop, placement.offset + start - first))
            index += 1
        return tuple(pieces)

    def check(self) -> None:
        """Assert that parameters lie inside the buffer, apart from each other, with their atoms whole."""
        assert self.num_shards >= 1, self.num_shards
        assert self.shard_numel >= 1, self.shard_numel
        for before, after in pairwise(self.placements):
            assert before.stop <= after.offset, (before, after)
        for index, placement in enumerate(self.placements):
            assert placement.numel == math.prod(placement.shape), placement
            assert placement.offset >= 0, placement
            assert placement.stop <= self.numel, (placement, self.numel)
            first = placement.offset // self.shard_numel
            for shard_index in range(first, min(-(-placement.stop // self.shard_numel), self.num_shards)):
                start, stop = self.span(index, shard_index)
                assert start % placement.atom == stop % placement.atom == 0, (placement, shard_index)
