"""Buckets: every element in one place, hard matrices whole, padding within the limit or the bound."""

import itertools
import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_muon_plugin.layout.bucket import Piece, round_up
from hp_muon_plugin.layout.bucket_bound import lower_bound, set_partitions
from hp_muon_plugin.layout.bucket_placement import can_keep_atoms, keeps_atoms, place
from hp_muon_plugin.layout.bucket_planner import plan_buckets


def soft(name: str, *shape: int) -> Piece:
    return Piece(name, shape, shape[-1] if len(shape) > 1 and shape[-1] else 1, False)


def hard(name: str, *shape: int) -> Piece:
    """Matrices in the last two dims, each whole."""
    return Piece(name, shape, math.prod(shape[-2:]) or 1, True)


@st.composite
def piece_lists(draw: st.DrawFn, *, max_size: int = 12) -> list[Piece]:
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    pieces = []
    for index in range(draw(st.integers(1, max_size))):
        shape = draw(shapes)
        depth = draw(st.integers(0, len(shape)))  # how many of the last dims are one atom
        pieces.append(Piece(f"p{index}", shape, math.prod(shape[len(shape) - depth :]) or 1, draw(st.booleans())))
    return pieces


SHARDS = st.integers(1, 17)
ALIGNS = st.sampled_from([1, 8, 12])


@settings(max_examples=300, deadline=None)
@given(piece_lists(), SHARDS, ALIGNS)
def test_plans_hold_every_piece_once_with_hard_atoms_whole(pieces: list[Piece], num_shards: int, align: int) -> None:
    buckets = plan_buckets(pieces, num_shards, align=align)
    placed = {placement.name: (placement, bucket) for bucket in buckets for placement in bucket.placements}
    assert sorted(placed) == sorted(piece.name for piece in pieces)
    assert sum(len(bucket.placements) for bucket in buckets) == len(pieces)
    for bucket in buckets:
        bucket.check()
        assert bucket.num_shards == num_shards
        assert bucket.shard_numel % align == 0
    for piece in pieces:
        placement, bucket = placed[piece.name]
        assert placement.shape == piece.shape
        assert placement.offset % align == 0
        assert placement.atom in ((piece.atom,) if piece.is_hard else (piece.atom, 1))
        for boundary in range(bucket.shard_numel, bucket.numel, bucket.shard_numel):
            if placement.offset < boundary < placement.stop:
                assert (boundary - placement.offset) % placement.atom == 0


@settings(max_examples=100, deadline=None)
@given(piece_lists(), SHARDS)
def test_shards_cover_every_element_once(pieces: list[Piece], num_shards: int) -> None:
    for bucket in plan_buckets(pieces, num_shards):
        owners = [0] * bucket.numel
        for index, placement in enumerate(bucket.placements):
            spans = [bucket.span(index, shard_index) for shard_index in range(num_shards)]
            assert spans[0][0] == 0
            assert spans[-1][1] == placement.numel
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
            assert spans == [bucket.span(placement.name, shard_index) for shard_index in range(num_shards)]
        for shard_index in range(num_shards):
            for placement, start, stop, offset in bucket.shard_pieces(shard_index):
                assert start < stop
                assert (start, stop) == bucket.span(placement.name, shard_index)
                first = shard_index * bucket.shard_numel + offset
                assert first == placement.offset + start
                assert offset + stop - start <= bucket.shard_numel
                for element in range(first, first + stop - start):
                    owners[element] += 1
        assert max(owners) <= 1
        assert owners.count(0) == bucket.padding


@settings(max_examples=100, deadline=None)
@given(piece_lists(), SHARDS, st.randoms(use_true_random=False))
def test_plan_is_the_same_for_any_input_order(pieces: list[Piece], num_shards: int, rng: random.Random) -> None:
    shuffled = list(pieces)
    rng.shuffle(shuffled)
    assert plan_buckets(shuffled, num_shards) == plan_buckets(pieces, num_shards)


@settings(max_examples=200, deadline=None)
@given(piece_lists(), SHARDS, ALIGNS)
def test_no_plan_beats_the_bound(pieces: list[Piece], num_shards: int, align: int) -> None:
    buckets = plan_buckets(pieces, num_shards, align=align)
    assert sum(bucket.shard_numel for bucket in buckets) >= lower_bound(pieces, num_shards, align=align)


def smallest_shard(pieces: Sequence[Piece], num_shards: int) -> int:
    """By trying every order: for a given order, putting each piece as far left as it may go is best."""
    for shard_numel in itertools.count(1):
        for order in itertools.permutations(pieces):
            cursor = 0
            for piece in order:
                starts = range(cursor, num_shards * shard_numel - piece.numel + 1)
                found = next((at for at in starts if not piece.is_hard or keeps_atoms(at, piece, shard_numel)), None)
                if found is None:
                    break
                cursor = found + piece.numel
            else:
                return shard_numel
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_bound_holds_for_the_best_of_all_plans(sizes: list[tuple[int, int, bool]], num_shards: int) -> None:
    pieces = [Piece(f"p{i}", (count, atom), atom, is_hard) for i, (count, atom, is_hard) in enumerate(sizes)]
    best = min(
        sum(smallest_shard([pieces[index] for index in group], num_shards) for group in groups)
        for groups in set_partitions(len(pieces))
    )
    assert lower_bound(pieces, num_shards, align=1) <= best
    planned = plan_buckets(pieces, num_shards, max_padding=0.0, align=1)
    assert sum(bucket.shard_numel for bucket in planned) >= best


@settings(max_examples=200, deadline=None)
@given(piece_lists(), SHARDS)
def test_soft_pieces_alone_never_pad_above_the_limit_or_alignment(pieces: list[Piece], num_shards: int) -> None:
    pieces = [Piece(piece.name, piece.shape, piece.atom, False) for piece in pieces]
    (bucket,) = plan_buckets(pieces, num_shards)
    needed = round_up(max(-(-sum(round_up(piece.numel, 8) for piece in pieces) // num_shards), 1), 8)
    assert bucket.padding_share <= 0.01 or bucket.shard_numel == needed


@settings(max_examples=200, deadline=None)
@given(piece_lists(), SHARDS, st.integers(1, 200))
def test_one_shard_large_enough_for_all_always_fits(pieces: list[Piece], num_shards: int, extra: int) -> None:
    numel = sum(round_up(piece.numel, 8) for piece in pieces)
    layout = place(pieces, num_shards, numel + 8 * extra)
    assert layout is not None
    layout.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 8), st.integers(1, 6), st.integers(1, 40))
def test_rules_of_cutting_agree_with_every_boundary(
    offset: int, count: int, atom: int, num_shards: int, shard_numel: int
) -> None:
    piece = Piece("p", (count, atom), atom, False)
    inside = [b for b in range(0, offset + piece.numel, shard_numel) if offset < b < offset + piece.numel]
    assert keeps_atoms(offset, piece, shard_numel) == all((b - offset) % atom == 0 for b in inside)
    any_offset = any(keeps_atoms(at, piece, shard_numel) for at in range(shard_numel))
    assert can_keep_atoms(piece, shard_numel) >= any_offset


def test_no_pieces_make_no_buckets() -> None:
    assert plan_buckets([], 4) == ()


def test_scalars_and_empty_parameters_have_places() -> None:
    (bucket,) = plan_buckets([soft("scalar"), soft("empty", 0, 5), hard("none", 0, 3, 3), soft("bias", 3)], 2)
    bucket.check()
    assert bucket.placement("scalar").numel == 1
    assert [bucket.span("empty", shard_index) for shard_index in range(2)] == [(0, 0), (0, 0)]
    held = [piece.placement.name for shard_index in range(2) for piece in bucket.shard_pieces(shard_index)]
    assert sorted(held) == ["bias", "scalar"]


def test_only_empty_parameters_still_have_a_buffer() -> None:
    (bucket,) = plan_buckets([soft("empty", 0)], 3)
    bucket.check()
    assert (bucket.shard_numel, bucket.padding) == (8, 24)


def test_fewer_rows_than_ranks_cuts_rows() -> None:
    (bucket,) = plan_buckets([soft("wide", 3, 8000)], 8)
    assert bucket.padding == 0
    assert bucket.placement(0).atom == 1


def test_fewer_matrices_than_ranks_leave_ranks_with_padding() -> None:
    (bucket,) = plan_buckets([hard("experts", 3, 16, 16)], 8)
    assert bucket.shard_numel == lower_bound([hard("experts", 3, 16, 16)], 8) == 256
    assert [len(bucket.shard_pieces(shard_index)) for shard_index in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert bucket.padding_share == 5 / 8


@pytest.mark.parametrize("shape", [(), (1,), (5,), (640, 32), (7, 11)])
def test_one_rank_pads_for_alignment_only(shape: tuple[int, ...]) -> None:
    (bucket,) = plan_buckets([soft("only", *shape)], 1)
    assert bucket.padding == -math.prod(shape) % 8
    assert bucket.placement(0).atom == (shape[-1] if len(shape) > 1 else 1)


def test_small_parameters_fill_holes_before_boundaries() -> None:
    """Two 96-element matrices cannot share a shard of 128; the vectors go beside them."""
    pieces = [hard("a", 8, 12), hard("b", 8, 12), soft("v", 32), soft("w", 32)]
    (bucket,) = plan_buckets(pieces, 2)
    assert (bucket.shard_numel, bucket.padding) == (128, 0)


def test_padding_of_experts_takes_weights_of_the_other_bucket() -> None:
    """Four matrices over eight ranks leave four shards, as much as one of the weights."""
    pieces = [hard("experts", 4, 64, 64), soft("large", 256, 64), soft("small", 64, 64)]
    filled, rest = plan_buckets(pieces, 8)
    assert [placement.name for placement in filled.placements] == ["experts", "large"]
    assert [placement.name for placement in rest.placements] == ["small"]
    assert filled.padding == rest.padding == 0


SIDES = [(rng.randrange(900, 1400), rng.randrange(900, 1400)) for rng in [random.Random(3)] for _ in range(4)]


@pytest.mark.parametrize("kind", ["soft", "mixed", "few sizes of matrices", "few sizes of stacks"])
def test_two_thousand_pieces_over_128_ranks_plan_within_two_seconds(kind: str) -> None:
    """Few coarse sizes leave holes that nothing fills, so every bucket and size is searched."""
    rng = random.Random(0)
    shapes = [(rng.randrange(1, 4000), rng.randrange(1, 4000)) for _ in range(2000)]
    pieces = {
        "soft": [soft(f"p{i}", *shape) for i, shape in enumerate(shapes)],
        "mixed": [(hard if i % 2 else soft)(f"p{i}", *shape) for i, shape in enumerate(shapes)],
        "few sizes of matrices": [hard(f"p{i}", *SIDES[i % 4]) for i in range(1990)] + [soft("w", 3000, 40000)],
        "few sizes of stacks": [hard(f"p{i}", 3, *SIDES[i % 4]) for i in range(1990)] + [soft("w", 3000, 40000)],
    }[kind]
    start = time.process_time()
    buckets = plan_buckets(pieces, 128)
    assert time.process_time() - start < 2
    assert sum(bucket.padding for bucket in buckets) <= 0.03 * sum(bucket.numel for bucket in buckets)
    for bucket in buckets:
        bucket.check()
