"""How evenly matrices are divided over ranks."""

import random
from bisect import bisect_left
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.muon.balance import divide, divide_parts

COSTS = st.lists(st.sampled_from([0.5, 1.0, 1.4, 2.0, 3.3, 5.0, 8.2, 13.0, 40.0]), min_size=1, max_size=90)
FREE_COSTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=90)


def least_possible(costs: list[float], num_ranks: int) -> float:
    """What no division can be below: the mean, and of any number of the largest items the share of one rank.

    Of the j largest, some rank has ``ceil(j / ranks)`` or more. One item (j = 1) and the pigeonhole of equal items
    are cases of it.
    """
    ordered = sorted(costs, reverse=True)
    shares = [sum(ordered[j - -(-j // num_ranks) : j]) for j in range(1, len(ordered) + 1)]
    return max(sum(costs) / num_ranks, *shares)


def check(costs: list[float], num_ranks: int) -> None:
    division = divide(costs, num_ranks)
    assert divide(list(costs), num_ranks) == division
    most, mean = max(division.loads), sum(costs) / num_ranks
    assert most <= (mean + (1 - 1 / num_ranks) * max(costs)) * (1 + 1e-9)
    assert division.imbalance * mean <= most * (1 + 1e-9)
    if len(costs) >= 4 * num_ranks:
        assert most <= 1.1 * least_possible(costs, num_ranks) * (1 + 1e-9)
    loads = [0.0] * num_ranks
    for cost, owner in zip(costs, division.owners, strict=True):
        loads[owner] += cost
    assert all(abs(a - b) <= 1e-9 * sum(costs) for a, b in zip(loads, division.loads, strict=True))


@given(COSTS, st.integers(1, 16))
def test_matrices_of_some_shapes(costs: list[float], num_ranks: int) -> None:
    check(costs, num_ranks)


@given(FREE_COSTS, st.integers(1, 16))
def test_any_costs(costs: list[float], num_ranks: int) -> None:
    check(costs, num_ranks)


@given(st.lists(st.sampled_from([1.0, 1.5, 2.2, 3.0, 4.1]), min_size=1, max_size=7), st.integers(1, 3))
def test_no_more_than_four_thirds_of_the_best_division(costs: list[float], num_ranks: int) -> None:
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks))
        for owners in product(range(num_ranks), repeat=len(costs))
    )
    assert max(divide(costs, num_ranks).loads) <= (4 / 3 - 1 / (3 * num_ranks)) * best * (1 + 1e-9)


def best_of_two_lengths(short: float, long: float, counts: tuple[int, int], num_ranks: int) -> float:
    """The least largest load of any division, by trying how many long items each rank gets."""
    candidates = sorted({i * short + j * long for i in range(counts[0] + 1) for j in range(counts[1] + 1)})

    def holds(limit: float) -> bool:
        most = [0] + [-1] * counts[1]  # short items that fit beside so many long ones, rank after rank
        for _ in range(num_ranks):
            after = [-1] * (counts[1] + 1)
            for taken, room in enumerate(most):
                for more in range(counts[1] - taken + 1) if room >= 0 else ():
                    if more * long <= limit * (1 + 1e-12):
                        fitting = room + int((limit - more * long) / short + 1e-9)
                        after[taken + more] = max(after[taken + more], fitting)
            most = after
        return most[counts[1]] >= counts[0]

    return candidates[bisect_left(candidates, True, key=holds)]


@given(st.floats(1, 30), st.floats(1, 30), st.integers(2, 12), st.data())
def test_matrices_of_two_lengths_are_within_a_tenth_of_the_best_division(
    one: float, other: float, num_ranks: int, data: st.DataObject
) -> None:
    """Two lengths fit together in few ways: the best division can be 1.2 times what :func:`least_possible` says."""
    total = data.draw(st.integers(4 * num_ranks, 5 * num_ranks))
    num_long = data.draw(st.integers(0, total))
    short, long = sorted((one, other))
    best = best_of_two_lengths(short, long, (total - num_long, num_long), num_ranks)
    division = divide([short] * (total - num_long) + [long] * num_long, num_ranks)
    assert max(division.loads) <= 1.1 * best * (1 + 1e-9)


def test_where_no_division_comes_within_a_tenth_of_the_mean() -> None:
    """The bound is of the best division: one matrix above the mean, or one more than ranks have room for, forbid it."""
    for costs, best in (([10.0] + [1.0] * 15, 1.6), ([1.0] * 17, 5 / 4.25)):
        assert least_possible(costs, 4) * 4 / sum(costs) == best
        assert divide(costs, 4).imbalance == best


def test_many_ranks() -> None:
    generator = random.Random(5)
    for num_ranks in (32, 96, 768):
        costs = [generator.choice([1.0, 2.5, 7.0, 7.1, 30.0]) for _ in range(4 * num_ranks + num_ranks // 3)]
        check(costs, num_ranks)


def test_what_ranks_do_anyway_counts() -> None:
    division = divide([1.0] * 6, 3, already=[3.0, 0.0, 0.0])
    assert division.loads == (3.0, 3.0, 3.0)
    only = divide([1.0, 1.0, 1.0], 3, allowed=[(2,), (2,), None])
    assert only.owners == (2, 2, 0)


@given(FREE_COSTS, st.integers(1, 16))
def test_owners_with_one_place_have_no_more_than_the_mean_and_one_item(costs: list[float], num_owners: int) -> None:
    owners = divide_parts([{0: cost} for cost in costs], num_owners, 1)
    most = max(
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == own) for own in range(num_owners)
    )
    assert most <= (sum(costs) / num_owners + (1 - 1 / num_owners) * max(costs)) * (1 + 1e-9)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_owners_share_equal_items_at_every_place(num_places: int, rounds: int, num_owners: int) -> None:
    """Items of one place each, one after another, as the experts of layers lie: no place has one owner's alone."""
    owners = divide_parts([{place: 1.0} for _ in range(rounds) for place in range(num_places)], num_owners, num_places)
    for place in range(num_places):
        counts = [owners[place::num_places].count(owner) for owner in range(num_owners)]
        assert max(counts) - min(counts) <= 1
    assert max(map(owners.count, range(num_owners))) <= -(-rounds * num_places // num_owners) + 1
