"""The layout of PyTorch's ``fully_shard``: every parameter is cut on its own, along dim 0, in equal chunks.

Shard ``i`` holds chunk ``i`` of every parameter, one after another. So what an all-gather delivers is
ordered by rank, not by parameter, and has to be copied into whole parameters; gradients likewise, the
other way. It exists to compare with, and for hosts that need chunks of dim 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.choices import ShardLayout
from hp_muon_plugin.layout.bucket import BucketLayout, Piece, Placement, ShardPiece, round_up
from hp_muon_plugin.layout.bucket_planner import plan_buckets
from hp_muon_plugin.layout.cuts import Cuts


@dataclass(frozen=True, slots=True)
class PerParamLayout(BucketLayout):
    """Chunks of dim 0. The buffer of placements is that of whole parameters, after the copy.

    Attributes:
        chunks: Elements of each parameter's chunk, in the order of ``placements``.
    """

    chunks: tuple[int, ...] = ()

    def span(self, key: str | int, shard_index: int) -> tuple[int, int]:
        """See :meth:`BucketLayout.span`; the last chunks may be short or empty."""
        index = self._index(key)
        chunk, numel = self.chunks[index], self.placements[index].numel
        return min(shard_index * chunk, numel), min((shard_index + 1) * chunk, numel)

    def cuts(self, key: str | int) -> Cuts:
        """See :meth:`BucketLayout.cuts`."""
        index = self._index(key)
        numel = self.placements[index].numel
        if not numel:
            return Cuts(self.num_shards, 0, (0,))
        return Cuts(self.num_shards, 0, (*range(0, numel, self.chunks[index]), numel))

    def place_in_shard(self, key: str | int, shard_index: int) -> int:
        """See :meth:`BucketLayout.place_in_shard`."""
        return sum(self.chunks[: self._index(key)])

    def shard_pieces(self, shard_index: int) -> tuple[ShardPiece, ...]:
        """See :meth:`BucketLayout.shard_pieces`."""
        found = []
        for index, placement in enumerate(self.placements):
            start, stop = self.span(index, shard_index)
            if start < stop:
                found.append(ShardPiece(placement, start, stop, self.place_in_shard(index, shard_index)))
        return tuple(found)

    def _index(self, key: str | int) -> int:
        if isinstance(key, int):
            return key
        return next(index for index, placement in enumerate(self.placements) if placement.name == key)

    def check(self) -> None:
        """Assert that chunks make up the shard and cover every parameter."""
        assert sum(self.chunks) <= self.shard_numel, self
        for chunk, placement in zip(self.chunks, self.placements, strict=True):
            assert chunk * self.num_shards >= placement.numel, (chunk, placement)
            assert chunk % max(placement.atom, 1) == 0, (chunk, placement)


def plan_per_param(pieces: Sequence[Piece], num_shards: int, *, align: int = 8) -> tuple[PerParamLayout, ...]:
    """Cut every parameter along dim 0.

    Args:
        pieces: Parameters; scalars count as one row of one element.
        num_shards: Ranks that share them.
        align: ``shard_numel`` is a multiple of it.

    Returns:
        One layout, or none for no parameters.
    """
    if not pieces:
        return ()
    chunks, placements, place = [], [], 0
    for piece in pieces:
        rows = piece.shape[0] if piece.shape else 1
        row = piece.numel // rows if rows else 1
        chunk = -(-rows // num_shards) * row
        chunks.append(chunk)
        placements.append(Placement(piece.name, piece.shape, place, piece.numel, max(row, 1)))
        place += num_shards * chunk
    shard_numel = max(align, round_up(sum(chunks), align))
    return (PerParamLayout(num_shards, shard_numel, tuple(placements), tuple(chunks)),)


def plan_layouts(
    pieces: Sequence[Piece], num_shards: int, kind: ShardLayout, *, max_padding: float
) -> tuple[BucketLayout, ...]:
    """Plan the buckets of a unit.

    Args:
        pieces: Parameters of one type.
        num_shards: Ranks that share them.
        kind: Which layout.
        max_padding: See :func:`~hp_muon_plugin.layout.bucket_planner.plan_buckets`; only for the flat layout.

    Returns:
        Layouts; every parameter is in one of them.
    """
    if kind is ShardLayout.per_param:
        return plan_per_param(pieces, num_shards)
    return plan_buckets(pieces, num_shards, max_padding=max_padding)
