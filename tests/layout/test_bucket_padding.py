"""Padding and whole rows of a 505B model's units: latent attention, 384 experts, hidden size 5120."""

import math
from collections.abc import Sequence

import pytest

from hp_muon_plugin.layout.bucket import BucketLayout, Piece
from hp_muon_plugin.layout.bucket_bound import lower_bound
from hp_muon_plugin.layout.bucket_planner import plan_buckets

HIDDEN = 5120
NUM_EXPERTS = 384
NICE_SHARDS = (2, 4, 8, 16, 32, 64, 128, 3, 6, 12, 24, 48, 96)


def soft(name: str, *shape: int) -> Piece:
    return Piece(name, shape, shape[-1] if len(shape) > 1 else 1, False)


def hard(name: str, *shape: int) -> Piece:
    """Matrices in the last two dims, each whole."""
    return Piece(name, shape, math.prod(shape[-2:]), True)


def attention() -> list[Piece]:
    matrices = {"q_a": (1536, HIDDEN), "q_b": (12288, 1536), "kv_a": (576, HIDDEN), "kv_b": (16384, 512)}
    norms = {"norm_1": (HIDDEN,), "norm_2": (HIDDEN,), "q_norm": (1536,), "kv_norm": (512,)}
    return [soft(name, *shape) for name, shape in ({**matrices, "o": (HIDDEN, 8192)} | norms).items()]


def embedding_unit() -> list[Piece]:
    return [soft("embedding", 151552, HIDDEN)]


def dense_unit() -> list[Piece]:
    return [*attention(), soft("fc1", 36864, HIDDEN), soft("fc2", HIDDEN, 18432)]


def shared_unit() -> list[Piece]:
    """A layer with experts, without its routed experts."""
    return [*attention(), soft("router", 384, HIDDEN), soft("shared_1", 3584, HIDDEN), soft("shared_2", HIDDEN, 1792)]


def expert_unit() -> list[Piece]:
    shapes = {"fc1": (3584, HIDDEN), "fc2": (HIDDEN, 1792)}
    return [hard(f"experts.{e}.{name}", *shape) for e in range(NUM_EXPERTS) for name, shape in shapes.items()]


def stacked_unit() -> list[Piece]:
    return [hard("w1", NUM_EXPERTS, 3584, HIDDEN), hard("w2", NUM_EXPERTS, HIDDEN, 1792)]


DENSE_UNITS = {"embedding": embedding_unit(), "dense": dense_unit(), "shared": shared_unit()}
EXPERT_UNITS = {
    "experts": expert_unit(),
    "stacked": stacked_unit(),
    "layer": shared_unit() + expert_unit(),
    "layer_stacked": shared_unit() + stacked_unit(),
}
UNITS = DENSE_UNITS | EXPERT_UNITS


def padding_share(buckets: Sequence[BucketLayout]) -> float:
    return sum(bucket.padding for bucket in buckets) / sum(bucket.numel for bucket in buckets)


def over_bound(buckets: Sequence[BucketLayout], pieces: Sequence[Piece]) -> float:
    shard_numel = sum(bucket.shard_numel for bucket in buckets)
    return shard_numel / lower_bound(pieces, buckets[0].num_shards) - 1


def aligned_share(buckets: Sequence[BucketLayout]) -> float:
    numel = sum(placement.numel for bucket in buckets for placement in bucket.placements)
    return sum(bucket.aligned_numel for bucket in buckets) / numel


def test_stacked_experts_part_only_where_that_lowers_padding() -> None:
    apart = plan_buckets(stacked_unit(), 128)
    assert len(apart) == 2
    assert padding_share(apart) == 0
    (together,) = plan_buckets(stacked_unit(), 127)
    # Both in one bucket pad 127 * 10 - 1152 of 1270 halves of a matrix; apart, 127 * 12 - 1152 of 1524.
    assert together.padding * 1270 == together.numel * (1270 - 1152)


def test_higher_limit_keeps_stacked_experts_together() -> None:
    (together,) = plan_buckets(stacked_unit(), 128, max_padding=0.12)
    assert 0.09 < together.padding_share < 0.12


@pytest.mark.parametrize("num_shards", NICE_SHARDS)
@pytest.mark.parametrize("unit", UNITS)
def test_padding_of_the_505b_model_is_within_the_limit(unit: str, num_shards: int) -> None:
    buckets = plan_buckets(UNITS[unit], num_shards)
    for bucket in buckets:
        bucket.check()
    assert padding_share(buckets) <= 0.01
    assert len(buckets) <= (3 if unit == "layer_stacked" else 2)
    assert aligned_share(buckets) >= 0.74


@pytest.mark.parametrize("unit", DENSE_UNITS)
def test_dense_units_pad_within_the_limit_over_any_ranks(unit: str) -> None:
    for num_shards in range(1, 129):
        (bucket,) = plan_buckets(DENSE_UNITS[unit], num_shards)
        bucket.check()
        assert bucket.padding_share <= 0.01, num_shards


@pytest.mark.parametrize("first", range(1, 129, 32))
@pytest.mark.parametrize("unit", EXPERT_UNITS)
def test_expert_units_pad_within_the_limit_of_the_bound_over_any_ranks(unit: str, first: int) -> None:
    for num_shards in range(first, first + 32):
        buckets = plan_buckets(EXPERT_UNITS[unit], num_shards)
        for bucket in buckets:
            bucket.check()
        assert over_bound(buckets, EXPERT_UNITS[unit]) <= 0.01, num_shards
        assert aligned_share(buckets) >= 0.99, num_shards


@pytest.mark.parametrize("num_shards", [2**k for k in range(8)])
@pytest.mark.parametrize("unit", ["layer", "layer_stacked"])
def test_powers_of_two_cut_no_row_of_a_layer_with_experts(unit: str, num_shards: int) -> None:
    atoms = {piece.name: piece.atom for piece in EXPERT_UNITS[unit]}
    for bucket in plan_buckets(EXPERT_UNITS[unit], num_shards):
        assert all(placement.atom == atoms[placement.name] for placement in bucket.placements)
