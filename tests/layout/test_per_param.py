import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.layout.bucket import Piece
from hp_muon_plugin.layout.per_param import plan_per_param

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


@given(SHAPES, st.integers(1, 9))
def test_chunks_cover_every_parameter_once_and_keep_rows_whole(shapes: list[tuple[int, ...]], num_shards: int) -> None:
    pieces = [Piece(f"w{index}", shape, 1, False) for index, shape in enumerate(shapes)]
    for layout in plan_per_param(pieces, num_shards):
        layout.check()
        for index, piece in enumerate(pieces):
            spans = [layout.span(index, shard) for shard in range(num_shards)]
            assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
            assert (spans[0][0], spans[-1][1]) == (0, piece.numel)
            row = piece.numel // piece.shape[0] if piece.shape and piece.shape[0] else 1
            assert all(row == 0 or start % row == 0 for start, _ in spans)
            for shard, (start, stop) in enumerate(spans):
                place = layout.place_in_shard(index, shard)
                assert place + stop - start <= layout.shard_numel
                assert ((layout.placements[index], start, stop, place) in layout.shard_pieces(shard)) == (stop > start)


def test_chunks_are_those_of_fully_shard() -> None:
    (layout,) = plan_per_param([Piece("a", (5, 3), 3, False), Piece("b", (2,), 1, False)], 4)
    assert [layout.span("a", shard) for shard in range(4)] == [(0, 6), (6, 12), (12, 15), (15, 15)]
    assert [layout.span("b", shard) for shard in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert (layout.place_in_shard("b", 1), layout.shard_numel, layout.padding) == (6, 8, 32 - 17)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_nothing_gives_no_layout(num_shards: int) -> None:
    assert plan_per_param([], num_shards) == ()
