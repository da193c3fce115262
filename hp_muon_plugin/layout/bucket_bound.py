"""How small the shards of a set of parameters can be at best, in whatever buckets they lie.

The bound holds for the sum of ``shard_numel`` over the buckets of any plan. Elements, whole hard atoms
and stacked parameters each imply a bound; the largest counts. Soft atoms imply none, for they may be cut.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hp_muon_plugin.layout.bucket import Piece, round_up

# Stacked parameters up to this many are tried in every split into buckets (Bell(6) = 203 of them).
MAX_SPLIT_PIECES = 6


def set_partitions(count: int) -> Iterator[list[list[int]]]:
    """Every way to split ``range(count)`` into groups.

    Args:
        count: Number of things.

    Yields:
        The groups of one way; each ascends, and so do their first members.
    """
    if count == 0:
        yield []
        return
    for groups in set_partitions(count - 1):
        for index in range(len(groups)):
            yield [[*group, count - 1] if index == at else list(group) for at, group in enumerate(groups)]
        yield [*(list(group) for group in groups), [count - 1]]


def lower_bound(pieces: Sequence[Piece], num_shards: int, *, align: int = 8) -> int:
    """Elements per shard that no plan goes below, however many buckets it has.

    Args:
        pieces: Parameters to place.
        num_shards: Ranks that share each bucket.
        align: What starts of parameters and shards are multiples of.

    Returns:
        The bound on ``shard_numel``, summed over buckets.
    """
    basic = basic_bound(pieces, num_shards, align=align)
    stacked = [piece for piece in pieces if piece.is_hard and piece.numel > piece.atom]
    best = basic
    # If shards are smaller than limit, what is longer than two of them spans two shard ends. So either
    # the shards reach limit, or such parameters obey the stricter bound.
    for limit in (basic + basic * share // 100 for share in (1, 2, 5, 10, 20, 50, 100, 300)):
        spanning = [piece for piece in stacked if piece.numel > 2 * limit]
        best = max(best, min(limit, _stacked_bound(spanning, num_shards)))
    return round_up(best, align)


def basic_bound(pieces: Sequence[Piece], num_shards: int, *, align: int = 8) -> int:
    """The bound that elements and whole hard atoms imply, wherever stacked parameters lie.

    Args:
        pieces: Parameters to place.
        num_shards: Ranks that share each bucket.
        align: What starts of parameters and shards are multiples of.

    Returns:
        Elements per shard, a multiple of ``align``, at least ``align``.
    """
    elements = sum(round_up(piece.numel, align) for piece in pieces)
    return round_up(max(-(-elements // num_shards), _atoms_bound(pieces, num_shards), 1), align)


def _atoms_bound(pieces: Sequence[Piece], num_shards: int) -> int:
    """What the fullest rank holds at least when hard atoms are dealt out whole."""
    counts: Counter[int] = Counter()
    for piece in pieces:
        if piece.is_hard and piece.numel:
            counts[piece.atom] += piece.numel // piece.atom
    if not counts:
        return 0
    sizes = sorted(counts, reverse=True)
    ends = list(accumulate(counts[size] for size in sizes))
    sums = [0, *accumulate(size * counts[size] for size in sizes)]

    def largest(count: int) -> int:
        """Elements of the ``count`` largest atoms."""
        at = bisect_left(ends, count)
        return sums[at + 1] - (ends[at] - count) * sizes[at]

    # Every rank's load is a multiple of the atoms' common divisor.
    unit = math.gcd(*sizes)
    bound = round_up(-(-sums[-1] // num_shards), unit)
    # Of the k * num_shards + 1 largest atoms some rank holds k + 1.
    for k in range(min((ends[-1] - 1) // num_shards, 256) + 1):
        last = k * num_shards + 1
        bound = max(bound, largest(last) - (largest(last - k - 1) if last > k + 1 else 0))
    return bound


def _stacked_bound(spanning: Sequence[Piece], num_shards: int) -> int:
    """The bound for stacked parameters that span two shard ends, so that atoms divide ``shard_numel``."""
    if not spanning or len(spanning) > MAX_SPLIT_PIECES:
        return 0
    return min(
        sum(_group_bound([spanning[index] for index in group], num_shards) for group in groups)
        for groups in set_partitions(len(spanning))
    )


def _group_bound(group: Sequence[Piece], num_shards: int) -> int:
    """``_stacked_bound`` of one bucket."""
    unit = math.lcm(*(piece.atom for piece in group))
    return round_up(-(-sum(piece.numel for piece in group) // num_shards), unit)
