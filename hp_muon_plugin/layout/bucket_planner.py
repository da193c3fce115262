"""Choose buckets and shard sizes: padding within a limit, few buckets, weights cut between rows.

One bucket is one collective, so a unit gets one bucket unless indivisible matrices make that pad more
than the limit: 384 stacked experts ``[E, 2I, H]`` and ``[E, H, I]`` over 128 ranks fill three matrices
of each a rank in a bucket of their own, and pad 11% together.

Within a bucket a larger shard may be a multiple of more row lengths. What no size within the limit
serves is cut inside rows; ``Placement.atom`` says so. On a 505B model (hidden 5120, latent attention,
384 experts) over 2 ** k <= 128 ranks every expert matrix is whole, and every row of a layer with
experts. The dense layer has 100% of its elements in whole rows up to 32 ranks and 88% at 64 and 128,
where its feed-forward and output projection have no common multiple within 1%. Over 3 * 2 ** k ranks it
is 100% up to 12, then 88% at 24 and 74% at 48 and 96. Other numbers of ranks keep 62% or more of that
layer in whole rows, 87% on average; layers with experts 99.4% or more (46% or more of what is not
routed experts, 75% on average).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from hp_muon_plugin.layout.bucket import BucketLayout, Piece, round_up
from hp_muon_plugin.layout.bucket_bound import basic_bound, lower_bound, set_partitions
from hp_muon_plugin.layout.bucket_placement import can_keep_atoms, place

# Row lengths combined with one another, those with most elements first: 2 ** 6 shard sizes.
MAX_ROW_LENGTHS = 6
# Shard sizes placed before settling for the best so far.
MAX_TRIES = 12
# Kinds of parameters that may part into buckets: Bell(4) = 15 ways.
MAX_KINDS = 4
# Soft pieces, largest first, that may fill the padding of matrices' buckets.
MAX_SPILLS = 16


def plan_buckets(
    pieces: Sequence[Piece], num_shards: int, *, max_padding: float = 0.01, align: int = 8
) -> tuple[BucketLayout, ...]:
    """Lay a unit's parameters out in as few buckets as padding allows.

    Padding above the limit comes from indivisible matrices, and from alignment where a shard has only some
    hundred elements. For a 505B model's units over 2 to 128 ranks it is then within ``max_padding`` of
    ``lower_bound``; so it is for 95% of random units with experts of two equal or one gated shape. It may
    exceed that where a few matrices a rank have many sizes, a packing problem that first-fit solves to
    some percent, and where a weight nearly as large as the matrices together fits no bucket's padding.

    Args:
        pieces: The parameters, in any order: the plan does not depend on it.
        num_shards: Ranks that share each bucket.
        max_padding: Padding worth paying for fewer collectives and whole rows, as a share of the buffers.
        align: Offsets and shard sizes are multiples of this many elements. The default is 16 bytes of
            bf16: kernels load that much at once.

    Returns:
        The buckets; none if there are no pieces.
    """
    assert len({piece.name for piece in pieces}) == len(pieces), "names must differ"
    for piece in pieces:
        piece.check()
    if not pieces:
        return ()
    search = _Search(_kinds(pieces), num_shards, max_padding, align, {})
    bound = num_shards * lower_bound(pieces, num_shards, align=align)
    limit = max(sum(piece.numel for piece in pieces) / (1 - max_padding), bound * (1 + max_padding))
    best: tuple[BucketLayout, ...] = ()
    for _, ways in groupby(sorted(set_partitions(len(search.kinds)), key=len), key=len):
        groupings = list(ways)
        for find in (search.apart, search.spilled):
            found = [find(groups) for groups in groupings]
            within = [buckets for buckets in found if _numel(buckets) <= limit]
            if within:
                return max(within, key=lambda buckets: (_aligned_numel(buckets), -_numel(buckets)))
            best = min([best, *found] if best else found, key=_numel)
    return best


@dataclass(frozen=True, slots=True)
class _Search:
    """Plans for ways to part kinds of pieces into buckets.

    Attributes:
        kinds: Pieces that stay together; soft ones are the last.
        num_shards: Ranks that share each bucket.
        max_padding: Padding worth paying, as a share of the buffers.
        align: Offsets and shard sizes are multiples of this.
        planned: Buckets planned so far, by the kinds in them.
    """

    kinds: list[list[Piece]]
    num_shards: int
    max_padding: float
    align: int
    planned: dict[tuple[int, ...], BucketLayout]

    def apart(self, groups: list[list[int]]) -> tuple[BucketLayout, ...]:
        """One bucket for each group of kinds."""
        return tuple(self._bucket(group) for group in groups)

    def spilled(self, groups: list[list[int]]) -> tuple[BucketLayout, ...]:
        """The same, but what room the other buckets have takes of the soft pieces' own bucket."""
        soft = [len(self.kinds) - 1]
        rest = self._pieces(soft)
        if soft not in groups or rest[0].is_hard:
            return self.apart(groups)
        buckets = []
        for group in groups:
            if group != soft:
                bucket, rest = self._fill(group, rest)
                buckets.append(bucket)
        if rest:
            buckets.append(_plan_bucket(rest, self.num_shards, self.max_padding, self.align))
        return tuple(buckets)

    def _pieces(self, group: list[int]) -> list[Piece]:
        return [piece for index in group for piece in self.kinds[index]]

    def _bucket(self, group: list[int]) -> BucketLayout:
        """The bucket of some kinds, planned once."""
        key = tuple(group)
        if key not in self.planned:
            self.planned[key] = _plan_bucket(self._pieces(group), self.num_shards, self.max_padding, self.align)
        return self.planned[key]

    def _fill(self, group: list[int], pieces: list[Piece]) -> tuple[BucketLayout, list[Piece]]:
        """The bucket of some kinds with such of the pieces as its padding takes, and the others."""
        bucket = self._bucket(group)
        inside = self._pieces(group)
        rest = []
        for index, piece in enumerate(sorted(pieces, key=lambda piece: (-piece.numel, piece.name))):
            fuller = None
            if index < MAX_SPILLS and piece.numel <= bucket.padding:
                fuller = place([*inside, piece], self.num_shards, bucket.shard_numel, align=self.align)
            if fuller is None:
                rest.append(piece)
            else:
                bucket = fuller
                inside.append(piece)
        return bucket, rest


def _numel(buckets: Iterable[BucketLayout]) -> int:
    return sum(bucket.numel for bucket in buckets)


def _aligned_numel(buckets: Iterable[BucketLayout]) -> int:
    return sum(bucket.aligned_numel for bucket in buckets)


def _kinds(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that share a bucket in every plan: stacked ones by atom, other hard ones, soft ones.

    What ranks hold of whole matrices in two buckets they can hold in one, so those need no parting.
    """
    sizes: Counter[int] = Counter()
    for piece in pieces:
        if piece.is_hard and piece.numel > piece.atom:
            sizes[piece.atom] += piece.numel
    atoms = sorted(sizes, key=lambda atom: (-sizes[atom], atom))[: MAX_KINDS - 2]
    kinds: list[list[Piece]] = [[] for _ in range(len(atoms) + 2)]
    for piece in pieces:
        if not piece.is_hard:
            kinds[-1].append(piece)
        elif piece.numel > piece.atom and piece.atom in atoms:
            kinds[atoms.index(piece.atom)].append(piece)
        else:
            kinds[-2].append(piece)
    return [kind for kind in kinds if kind]


def _plan_bucket(pieces: Sequence[Piece], num_shards: int, max_padding: float, align: int) -> BucketLayout:
    """One bucket: most elements in whole rows within the limit, else least padding."""
    smallest = basic_bound(pieces, num_shards, align=align)
    largest = int(sum(piece.numel for piece in pieces) / (1 - max_padding)) // num_shards
    stacked = (piece for piece in pieces if piece.is_hard and piece.numel > max(piece.atom, 2 * smallest))
    step = math.lcm(align, *(piece.atom for piece in stacked))
    # Matrices fill shards best that are multiples of their common divisor.
    unit = math.lcm(step, math.gcd(*(piece.atom for piece in pieces if piece.is_hard)) or 1)
    sizes = _row_sizes(pieces, smallest, largest, step)
    sizes |= {size for size in (round_up(smallest, unit),) if size <= largest}
    layout = _most_aligned(pieces, num_shards, sizes, align)
    if layout is not None:
        return layout
    # A shard of half a stacked parameter or more need not be a multiple of its matrices: hence align.
    steps = sorted({align, step, unit})
    found = min(
        (_least_padding(pieces, num_shards, smallest, step, align) for step in steps),
        key=lambda layout: layout.shard_numel,
    )
    sizes = _row_sizes(pieces, found.shard_numel, largest, align)
    return _most_aligned(pieces, num_shards, sizes, align) or found


def _row_sizes(pieces: Sequence[Piece], smallest: int, largest: int, step: int) -> set[int]:
    """Shard sizes in the range that are multiples of ``step`` and of some row lengths."""
    elements: Counter[int] = Counter()
    for piece in pieces:
        if not piece.is_hard and piece.atom > 1 and piece.numel > smallest:
            elements[piece.atom] += piece.numel
    rows = sorted(elements, key=lambda row: (-elements[row], row))[:MAX_ROW_LENGTHS]
    sizes = set()
    for count in range(len(rows) + 1):
        for chosen in combinations(rows, count):
            multiple = math.lcm(step, *chosen)
            first = round_up(smallest, multiple)
            # Larger ones leave room to move weights to where rows stay whole.
            stride = round_up(max(largest - first, 1), 3 * multiple) // 3
            sizes |= {size for size in (first, first + multiple, *range(first, largest + 1, stride)) if size <= largest}
    return sizes


def _most_aligned(pieces: Sequence[Piece], num_shards: int, sizes: Iterable[int], align: int) -> BucketLayout | None:
    """The placed layout with most elements in whole atoms, of the smallest such size; None if none fits."""
    rows = [piece for piece in pieces if piece.atom > 1]

    def hoped(size: int) -> int:
        """Elements in whole atoms if every weight that can be so placed is."""
        return sum(piece.numel for piece in rows if can_keep_atoms(piece, size))

    best: BucketLayout | None = None
    for unhoped, size in sorted((-hoped(size), size) for size in sizes)[:MAX_TRIES]:
        if best is not None and best.aligned_numel >= -unhoped:
            break
        layout = place(pieces, num_shards, size, align=align)
        if layout is not None and (best is None or layout.aligned_numel > best.aligned_numel):
            best = layout
    return best


def _least_padding(pieces: Sequence[Piece], num_shards: int, smallest: int, step: int, align: int) -> BucketLayout:
    """About the smallest shard in which everything fits: one shard large enough for all is certain to do."""
    low, width = round_up(smallest, step) // step - 1, 1
    layout = place(pieces, num_shards, (low + width) * step, align=align)
    while layout is None:  # double until it fits
        low, width = low + width, max(2 * width, low // 512)
        layout = place(pieces, num_shards, (low + width) * step, align=align)
    while width > max(1, low // 4096):  # low does not fit, low + width does
        middle = place(pieces, num_shards, (low + width // 2) * step, align=align)
        if middle is None:
            low, width = low + width // 2, width - width // 2
        else:
            layout, width = middle, width // 2
    return layout
