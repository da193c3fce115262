"""What is orthogonalised together, and which rank holds which of its elements.

A parameter lies on a shard axis in stretches: rank ``i`` holds the elements ``cuts[i]`` to
``cuts[i + 1]`` of it, counted in its tensor-parallel part. HP-FSDP's buckets, chunks of dim 0 (torch's
``fully_shard``) and the flat shards of Megatron's DistributedOptimizer are all of this kind.

An item is a stretch of a parameter that no matrix leaves: the parameter itself, or, where its first
factor numbers matrices (stacked experts, heads, gate and up), one of these, so that each can have an
owner of its own. Neighbours that lie whole on one rank are one item. Where ranks cut a stretch of several
matrices between rows, and each is whole rows (q, k and v of a fused weight), these are items too: their
elements lie apart from each other, block by block.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import MatrixPart, MatrixView, ParamSpec
from hp_muon_plugin.muon.distributed.stripes import Run, Stripe, stripe_of


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """A parameter on a shard axis.

    Attributes:
        spec: The whole parameter; its ``split`` tells tensor-parallel parts, which shards cut further.
        cuts: ``(ranks + 1,)`` ascending from 0 to ``spec.local_numel``; any sequence becomes :class:`Cuts`.
    """

    spec: ParamSpec
    cuts: Cuts

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", Cuts.of(self.cuts))

    def check(self) -> None:
        """Assert that the stretches cover the parameter in rank order."""
        ends = self.cuts.ends
        assert ends[0] == 0, self
        assert ends[-1] == self.spec.local_numel, self
        assert all(low <= high for low, high in zip(ends, ends[1:], strict=False)), self


@dataclass(frozen=True, slots=True)
class Item:
    """Matrices that one rank orthogonalises together.

    Attributes:
        param: Index of the parameter among those of the plan.
        start: First element, counted in the parameter's tensor-parallel part.
        spec: The stretch as a parameter of its own.
        cuts: ``(ranks + 1,)`` as of :class:`ShardedParam`, in the item's own elements.
        stripe: Where its elements lie, counted from ``start``; None if one after another.
    """

    param: int
    start: int
    spec: ParamSpec
    cuts: Cuts
    stripe: Stripe | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", Cuts.of(self.cuts))

    @property
    def numel(self) -> int:
        """Elements of the tensor-parallel part."""
        return self.spec.local_numel

    def span(self, rank: int) -> tuple[int, int]:
        """What a rank holds.

        Args:
            rank: Place on the shard axis.

        Returns:
            ``(start, stop)`` counted from the item's start; equal if it holds nothing.
        """
        return self.cuts[rank], self.cuts[rank + 1]

    def held(self, rank: int) -> int:
        """Elements that a rank holds."""
        return self.cuts[rank + 1] - self.cuts[rank]

    def runs(self, low: int, high: int) -> Iterator[Run]:
        """Where elements lie in the parameter, counted from :attr:`start`.

        Args:
            low: The first one.
            high: The one after the last.

        Yields:
            Runs that hold each of them once, in their order.
        """
        if self.stripe is not None:
            yield from self.stripe.runs(low, high)
        elif low < high:
            yield Run(low, low, 1, high - low, high - low)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold something, ascending."""
        return self.cuts.holders

    @property
    def is_cut(self) -> bool:
        """Whether more than one rank holds something."""
        return self.cuts.is_shared

    @property
    def matrix(self) -> tuple[int, int] | None:
        """``(rows, cols)`` if the item is one row-major matrix that no tensor-parallel rank shares, else None."""
        view = self.spec.view
        if self.spec.split is not None or view is None or len(view.parts) != 1:
            return None
        part = view.parts[0]
        count, rows, cols = view.part_shape(part)
        in_order = (*part.batch, *part.rows, *part.cols) == tuple(range(len(view.factors)))
        return (rows, cols) if count == 1 and in_order and rows * cols == self.numel else None

    @property
    def is_cut_between_rows(self) -> bool:
        """Whether every stretch is whole rows of :attr:`matrix`."""
        shape = self.matrix
        return shape is not None and all(end % shape[1] == 0 for end in self.cuts.ends)


def items_of(index: int, param: ShardedParam) -> list[Item]:
    """Divide a parameter.

    Args:
        index: The parameter's index among those of the plan.
        param: The parameter.

    Returns:
        Items in the order of their elements; they cover the parameter.
    """
    spec = param.spec
    if not spec.local_numel:
        return []
    if not _is_divisible(spec):
        return _by_matrix(Item(index, 0, spec, param.cuts))
    assert spec.view is not None
    block = spec.numel // spec.view.factors[0]
    return [
        item
        for first, last in _runs(param.cuts, spec.view.factors[0], block)
        for item in _by_matrix(
            Item(index, first * block, _blocks(spec, first, last), param.cuts.clipped(first * block, last * block))
        )
    ]


def pieces_of(index: int, spec: ParamSpec, count: int) -> list[Item]:
    """Divide a parameter that one rank holds whole into at most ``count`` stretches that no matrix leaves.

    Args:
        index: The parameter's index.
        spec: The parameter.
        count: How many.

    Returns:
        Items in the order of their elements; their cuts are those of one rank.
    """
    if not spec.local_numel:
        return []
    if not _is_divisible(spec):
        return [Item(index, 0, spec, Cuts.of((0, spec.local_numel)))]
    assert spec.view is not None
    blocks = spec.view.factors[0]
    size = -(-blocks // count)
    each = spec.numel // blocks
    pieces = [(first, min(first + size, blocks)) for first in range(0, blocks, size)]
    return [
        Item(index, first * each, _blocks(spec, first, last), Cuts.of((0, (last - first) * each)))
        for first, last in pieces
    ]


def _by_matrix(item: Item) -> list[Item]:
    """An item that ranks cut, divided into its matrices where each is whole rows and no rank's part ends inside one."""
    view = item.spec.view
    if not item.is_cut or item.spec.split is not None or view is None or len(view.parts) < 2:
        return [item]
    found = [stripe_of(view, part) for part in view.parts]
    if any(told is None or any(end % told[1].factors[-1] for end in item.cuts.ends) for told in found):
        return [item]
    return [
        Item(
            item.param,
            item.start,
            replace(item.spec, name=f"{item.spec.name}[{part.label}]", shape=own.factors, view=own),
            item.cuts.mapped(stripe.before),
            stripe,
        )
        for part, (stripe, own) in zip(view.parts, filter(None, found), strict=True)
    ]


def _is_divisible(spec: ParamSpec) -> bool:
    """Whether dim 0 of the factors numbers matrices in every part."""
    view = spec.view
    if spec.split is not None or view is None or len(view.factors) < 3 or view.factors[0] < 2:
        return False
    return all(0 in part.batch for part in view.parts)


def _runs(cuts: Sequence[int], count: int, block: int) -> Iterator[tuple[int, int]]:
    """Blocks ``[first, last)``: alone where cut, together where one rank holds them whole."""
    first = 0
    while first < count:
        rank = bisect_right(cuts, first * block) - 1  # who holds the first element
        last = min(count, cuts[rank + 1] // block)
        last = max(last, first + 1)
        yield first, last
        first = last


def _blocks(spec: ParamSpec, first: int, last: int) -> ParamSpec:
    """Blocks of dim 0 as a parameter of their own."""
    view = spec.view
    assert view is not None
    factors = (last - first, *view.factors[1:])
    parts = [kept for part in view.parts if (kept := _part(part, first, last)) is not None]
    whole = first == 0 and last == view.factors[0]
    name = spec.name if whole else f"{spec.name}[{first}:{last}]"
    return replace(spec, name=name, shape=factors, view=MatrixView(factors, tuple(parts)))


def _part(part: MatrixPart, first: int, last: int) -> MatrixPart | None:
    if part.narrow is None or part.narrow[0] != 0:
        return part
    _, start, length = part.narrow
    low, high = max(start, first), min(start + length, last)
    if low >= high:
        return None
    is_all = (low, high) == (first, last)
    return replace(part, narrow=None if is_all else (0, low - first, high - low))


def dim0_cuts(shape: Sequence[int], num_shards: int) -> Cuts:
    """Cuts of the chunks of dim 0 that ``torch.chunk`` and torch's ``fully_shard`` make.

    Args:
        shape: Of the parameter.
        num_shards: Ranks.

    Returns:
        ``(num_shards + 1,)`` elements; the last ranks may hold less, or nothing.
    """
    rows = shape[0] if shape else 1
    row = math.prod(shape[1:])
    chunk = -(-rows // num_shards)
    return Cuts.of([min(rank * chunk, rows) * row for rank in range(num_shards + 1)])
