"""Place parameters in one buffer whose shard size is given.

Parameters form a chain from the start of the buffer. One that must not be cut where a shard ends moves
on; the hole it leaves takes later, smaller ones. Hard atoms come first, largest first, since they leave
the largest holes, then weights whose rows divide the shard, then what may be cut, then the small rest.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from hp_muon_plugin.layout.bucket import BucketLayout, Piece, Placement, round_up


def place(pieces: Sequence[Piece], num_shards: int, shard_numel: int, *, align: int = 8) -> BucketLayout | None:
    """Place all pieces, soft atoms whole as long as there is room to move them.

    Args:
        pieces: Parameters to place, in any order: the result does not depend on it.
        num_shards: Ranks that share the buffer.
        shard_numel: Elements of each shard, a multiple of ``align``.
        align: What every offset is a multiple of.

    Returns:
        The layout, or None if this found no room for all.
    """
    capacity = num_shards * shard_numel
    to_place = sum(round_up(piece.numel, align) for piece in pieces)
    cursor = 0  # end of the chain
    holes: list[tuple[int, int]] = []  # (size, start), ascending; each inside one shard
    placements = []
    for piece in sorted(pieces, key=lambda piece: _order(piece, shard_numel)):
        numel = piece.numel
        used = round_up(numel, align)
        offset = _take_hole(holes, used)
        if offset is None:
            offset = _next_offset(cursor, piece, shard_numel, align)
            if not piece.is_hard and (offset is None or offset + to_place > capacity):
                offset = cursor
            if offset is None or offset + numel > capacity:
                return None
            _add_holes(holes, cursor, offset, shard_numel)
            cursor = offset + used
        to_place -= used
        atom = piece.atom if keeps_atoms(offset, piece, shard_numel) else 1
        placements.append(Placement(piece.name, piece.shape, offset, numel, atom))
    placements.sort(key=lambda placement: (placement.offset, placement.numel, placement.name))
    return BucketLayout(num_shards, shard_numel, tuple(placements))


def keeps_atoms(offset: int, piece: Piece, shard_numel: int) -> bool:
    """Whether no shard end cuts an atom of a piece that starts at ``offset``.

    Args:
        offset: First element of the piece in the buffer.
        piece: The parameter.
        shard_numel: Elements of each shard.

    Returns:
        True if every shard holds whole atoms of it.
    """
    boundary = (offset // shard_numel + 1) * shard_numel
    stop = offset + piece.numel
    if stop <= boundary:
        return True
    is_first_whole = (boundary - offset) % piece.atom == 0
    return is_first_whole and (stop <= boundary + shard_numel or shard_numel % piece.atom == 0)


def can_keep_atoms(piece: Piece, shard_numel: int) -> bool:
    """Whether some offset keeps the atoms of a piece whole: none does if it must span two misplaced ends.

    Args:
        piece: The parameter.
        shard_numel: Elements of each shard.

    Returns:
        False if every offset cuts an atom.
    """
    return shard_numel % piece.atom == 0 or piece.numel <= 2 * shard_numel


def _order(piece: Piece, shard_numel: int) -> tuple[int, int, int, str]:
    """Sort key of the chain; names break ties, so that the order of the input does not matter."""
    numel = piece.numel
    if piece.is_hard:
        stage = 0 if numel > piece.atom else 1
    elif piece.atom > 1:
        stage = 2 if can_keep_atoms(piece, shard_numel) else 3
    else:
        stage = 4
    return stage, -piece.atom, -numel, piece.name


def _next_offset(cursor: int, piece: Piece, shard_numel: int, align: int) -> int | None:
    """The first offset from the cursor on that keeps the atoms of the piece whole; None if there is none."""
    numel = piece.numel
    step = math.lcm(piece.atom, align)
    offset = cursor
    for _ in range(2):  # the shard the cursor is in, and one from its start; later shards are alike
        boundary = (offset // shard_numel + 1) * shard_numel
        if offset + numel <= boundary:
            return offset
        offset = boundary - (boundary - offset) // step * step
        if offset < boundary and keeps_atoms(offset, piece, shard_numel):
            return offset
        offset = boundary
    return None


def _add_holes(holes: list[tuple[int, int]], start: int, stop: int, shard_numel: int) -> None:
    """Note that ``[start, stop)`` is free, one hole for each shard it touches."""
    while start < stop:
        end = min((start // shard_numel + 1) * shard_numel, stop)
        insort(holes, (end - start, start))
        start = end


def _take_hole(holes: list[tuple[int, int]], used: int) -> int | None:
    """The start of the smallest hole with room for ``used`` elements, which are taken from it."""
    at = bisect_left(holes, (used, 0))
    if at == len(holes):
        return None
    size, start = holes.pop(at)
    if used < size:
        insort(holes, (size - used, start + used))
    return start
