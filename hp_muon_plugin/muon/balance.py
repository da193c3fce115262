"""Dividing work over ranks: the longest first, each to whoever has least, then moves and swaps, then packing.

Longest-processing-time is within ``4/3 - 1/(3 W)`` of the best division (R. L. Graham, Bounds on
multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969), and no rank has more than the mean
and one item: ``mean + (1 - 1/W) * largest``. Moves and swaps only ever lower the largest load.

Where that is above what is surely needed, ranks are packed instead, each as full as a limit allows, with the least
limit that holds all (MULTIFIT: E. G. Coffman, M. R. Garey, D. S. Johnson, SIAM J. Comput. 7, 1978, within 1.22 of the
best division). Items of two lengths, which fit together on a rank in one way only, need it.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_ROUNDS = 64
_MAX_LIMITS = 12
_WORTH_PACKING = 1.02


@dataclass(frozen=True, slots=True)
class Division:
    """Owners.

    Attributes:
        owners: Owner of each item.
        loads: Cost of each rank.
    """

    owners: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Largest load over the mean; 1 where there is no work."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def divide(
    costs: Sequence[float],
    num_ranks: int,
    *,
    preferred: Sequence[Sequence[int]] | None = None,
    allowed: Sequence[Sequence[int] | None] | None = None,
    already: Sequence[float] | None = None,
) -> Division:
    """Give every item an owner. Equal input gives equal owners, whatever the machine.

    Args:
        costs: Of each item, at least 0.
        num_ranks: Ranks.
        preferred: For each item, ranks that win ties, as those that hold a part of it.
        allowed: For each item, the only ranks that may own it, or None where all may. None: all of them own any.
        already: What each rank has to do besides. None: nothing.

    Returns:
        The division.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    owners, loads = [0] * len(costs), list(already or [0.0] * num_ranks)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for item in order:
        among = allowed[item] if allowed is not None else None
        if among is not None:
            owner = min(among, key=lambda rank: (loads[rank], rank))
        else:
            owner = _least(heap, loads, preferred[item] if preferred else ())
        owners[item] = owner
        loads[owner] += costs[item]
        heapq.heappush(heap, (loads[owner], owner))
    if allowed is None:
        _improve(costs, owners, loads)
        found = _packed(costs, order, list(already or [0.0] * num_ranks), max(loads))
        if found is not None:
            owners, loads = found
            _improve(costs, owners, loads)
    return Division(tuple(owners), tuple(loads))


def divide_parts(parts: Sequence[Mapping[int, float]], num_owners: int, num_places: int) -> tuple[int, ...]:
    """Give every item an owner where each owner has several places, and an item's parts lie at fixed ones.

    The longest first, each to the owner with whom the sum of squares of all loads grows least: of each place of each
    owner, and of owners as if their places had equal loads.

    Args:
        parts: Cost of each item by place; places that hold nothing of it are left out.
        num_owners: Owners.
        num_places: Places of each.

    Returns:
        The owner of each item.
    """
    costs = [sum(part.values()) for part in parts]
    loads: list[dict[int, float]] = [{} for _ in range(num_owners)]
    totals = [0.0] * num_owners

    def growth(item: int, owner: int) -> float:
        here = sum(cost * loads[owner].get(place, 0.0) for place, cost in parts[item].items())
        return here + costs[item] * totals[owner] / num_places

    owners = [0] * len(parts)
    for item in sorted(range(len(parts)), key=lambda item: (-costs[item], item)):
        owner = min(range(num_owners), key=lambda owner: (growth(item, owner), owner))
        owners[item] = owner
        totals[owner] += costs[item]
        for place, cost in parts[item].items():
            loads[owner][place] = loads[owner].get(place, 0.0) + cost
    return tuple(owners)


def _least(heap: list[tuple[float, int]], loads: Sequence[float], preferred: Sequence[int]) -> int:
    """The rank with the least load; among equals one of the preferred. Old entries of the heap are dropped."""
    while heap[0][0] != loads[heap[0][1]]:
        heapq.heappop(heap)
    least = heap[0][0]
    for rank in preferred:
        if loads[rank] == least:
            return rank
    return heap[0][1]


def _packed(
    costs: Sequence[float], order: Sequence[int], start: Sequence[float], most: float
) -> tuple[list[int], list[float]] | None:
    """Owners and loads below ``most``, packed to the least limit that holds all; None where that is not worth it."""
    largest, mean = max(costs, default=0.0), (sum(start) + sum(costs)) / len(start)
    low, high = max(mean, largest, *start), most
    best = None
    for _ in range(_MAX_LIMITS):
        if high <= low * _WORTH_PACKING:
            break
        limit = (low + high) / 2
        found = _first_fit(costs, order, start, limit)
        if found is None:
            low = limit
        else:
            best, high = found, max(found[1])
    return best


def _first_fit(
    costs: Sequence[float], order: Sequence[int], start: Sequence[float], limit: float
) -> tuple[list[int], list[float]] | None:
    """Every item to the first rank on which it stays within a limit; None if one fits nowhere."""
    leaves = 1 << (len(start) - 1).bit_length()
    least = [math.inf] * leaves + list(start) + [math.inf] * (leaves - len(start))  # a tree; loads are its leaves
    for node in range(leaves - 1, 0, -1):
        least[node] = min(least[2 * node], least[2 * node + 1])
    owners = [0] * len(costs)
    for item in order:
        room = limit - costs[item]
        if least[1] > room:
            return None
        node = 1
        while node < leaves:
            node = 2 * node if least[2 * node] <= room else 2 * node + 1
        owners[item] = node - leaves
        least[node] += costs[item]
        while node > 1:
            node //= 2
            least[node] = min(least[2 * node], least[2 * node + 1])
    return owners, least[leaves : leaves + len(start)]


def _improve(costs: Sequence[float], owners: list[int], loads: list[float]) -> None:
    """Move or swap items of the busiest rank while that lowers its load below what it was."""
    if len(loads) < 2 or not costs:
        return
    held: list[list[int]] = [[] for _ in loads]
    for item, owner in enumerate(owners):
        held[owner].append(item)
    for _ in range(_MAX_ROUNDS):
        busy = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        idle = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        found = _best_exchange(costs, held[busy], held[idle], loads[busy] - loads[idle])
        if found is None:
            return
        given, taken = found
        gain = costs[given] - (costs[taken] if taken is not None else 0.0)
        _hand_over(given, busy, idle, held, owners)
        if taken is not None:
            _hand_over(taken, idle, busy, held, owners)
        loads[busy] -= gain
        loads[idle] += gain


def _best_exchange(
    costs: Sequence[float], busy: Sequence[int], idle: Sequence[int], gap: float
) -> tuple[int, int | None] | None:
    """What to give and what to take back so that the two loads come closest; None if nothing helps."""
    best, found = gap * (1 - 1e-9), None
    givers = {costs[item]: item for item in reversed(busy)}
    takers: dict[float, int | None] = {costs[item]: item for item in reversed(idle)}
    takers[0.0] = None
    for given_cost, given in givers.items():
        for taken_cost, taken in takers.items():
            rest = abs(gap - 2 * (given_cost - taken_cost))
            if given_cost > taken_cost and rest < best:
                best, found = rest, (given, taken)
    return found


def _hand_over(item: int, source: int, target: int, held: list[list[int]], owners: list[int]) -> None:
    held[source].remove(item)
    held[target].append(item)
    owners[item] = target
