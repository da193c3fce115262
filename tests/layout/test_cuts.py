"""Cuts stored for the ranks that hold something read like cuts of all ranks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.layout.bucket import Piece
from hp_muon_plugin.layout.bucket_planner import plan_buckets
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.per_param import plan_per_param

ASCENDING = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(lambda ends: (0, *sorted(ends)))


@given(ASCENDING)
def test_all_numbers_are_there(cuts: tuple[int, ...]) -> None:
    sparse = Cuts.of(cuts)
    assert tuple(sparse) == cuts == sparse[:]
    assert (len(sparse), sparse[-1], sparse.numel) == (len(cuts), cuts[-1], cuts[-1])
    assert sparse.holders == tuple(rank for rank, (low, high) in enumerate(pairwise(cuts)) if low < high)
    assert list(sparse.pieces()) == [(r, low, high) for r, (low, high) in enumerate(pairwise(cuts)) if low < high]
    assert Cuts.of(tuple(sparse)) == Cuts.of(sparse) == sparse
    with pytest.raises(IndexError):
        sparse[len(cuts)]


@given(ASCENDING, st.data())
def test_a_stretch_has_the_cuts_inside_it(cuts: tuple[int, ...], data: st.DataObject) -> None:
    if not cuts[-1]:
        return
    start = data.draw(st.integers(0, cuts[-1] - 1))
    stop = data.draw(st.integers(start + 1, cuts[-1]))
    clipped = tuple(min(max(cut, start), stop) - start for cut in cuts)
    assert tuple(Cuts.of(cuts).clipped(start, stop)) == clipped


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 7))
def test_layouts_tell_them(shapes: list[tuple[int, int]], num_shards: int) -> None:
    pieces = [Piece(str(number), shape, shape[1], False) for number, shape in enumerate(shapes)]
    for layout in (*plan_buckets(pieces, num_shards), *plan_per_param(pieces, num_shards)):
        for index in range(len(layout.placements)):
            spans = [layout.span(index, shard) for shard in range(num_shards)]
            assert layout.cuts(index) == Cuts.of((0, *(stop for _, stop in spans)))
