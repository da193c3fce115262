"""The plan of a Muon step over one shard axis: from layouts alone, the same on every rank.

No tensors and no process group: the plan of a run on thousands of ranks is made on one machine. Items
that lie whole on a rank are its own. The others are exchanged in batches; each batch has one strategy,
an owner for every item, and messages whose bytes are known before anything is sent.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from hp_muon_plugin.config.choices import FloatDtype, Strategy
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.algorithm import TABLE, Rule, load_table
from hp_muon_plugin.muon.coefficients import Coefficients, resolve_schedule
from hp_muon_plugin.muon.distributed.balance import divide
from hp_muon_plugin.muon.distributed.cost import DEFAULT_RATES, Kind, Rates, kind_of, prices
from hp_muon_plugin.muon.distributed.items import Item, ShardedParam, items_of

_BATCH_BYTES = 64 << 20
_SMALL_BYTES = 4  # Gram matrices and factors are float32


class Route(StrEnum):
    """How the items of a batch become whole, and what comes back."""

    EVERYWHERE = "allgather"
    UPDATES = "allgather_dedup"
    FACTORS = "allgather_dedup+factor"
    OWNER = "alltoall"
    GRAM = "gram"
    GATHERED_GRAM = "gram+gathered"

    @property
    def gathers(self) -> bool:
        """Whether every rank receives the whole items."""
        return self in (Route.EVERYWHERE, Route.UPDATES, Route.FACTORS, Route.GATHERED_GRAM)

    @property
    def has_factors(self) -> bool:
        """Whether ranks apply factors to what they hold."""
        return self in (Route.FACTORS, Route.GRAM, Route.GATHERED_GRAM)


# What takes the place of a strategy for items for which it is not possible, in order of preference.
_ROUTES: dict[Strategy, tuple[Route, ...]] = {
    Strategy.allgather: (Route.EVERYWHERE,),
    Strategy.allgather_dedup: (Route.UPDATES, Route.FACTORS),
    Strategy.alltoall: (Route.OWNER,),
    Strategy.gram: (Route.GRAM, Route.GATHERED_GRAM),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that are exchanged together.

    Attributes:
        route: How.
        items: Indices into ``SharePlan.items``, in the order of the messages.
        owners: Who orthogonalises each.
    """

    route: Route
    items: tuple[int, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class SharePlan:
    """A Muon step over one shard axis.

    Attributes:
        axis: Its name.
        size: Ranks on it.
        params: The parameters.
        items: Their items.
        kinds: The cost of each item.
        batches: Exchanges, in order.
        coefficients: Of every Newton-Schulz step.
        rates: By which strategies were chosen.
        itemsize: Bytes of an exchanged number.
        loads: Newton-Schulz operations of each rank, Gram products and applied factors included.
    """

    axis: str
    size: int
    params: tuple[ShardedParam, ...]
    items: tuple[Item, ...]
    kinds: tuple[Kind, ...]
    batches: tuple[Batch, ...]
    coefficients: tuple[Coefficients, ...]
    rates: Rates
    itemsize: int
    loads: tuple[float, ...]

    def local(self, rank: int) -> tuple[int, ...]:
        """Items that lie whole on a rank.

        Args:
            rank: Place on the axis.

        Returns:
            Indices into ``items``.
        """
        return self._local.get(rank, ())

    @cached_property
    def _local(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        exchanged = {index for batch in self.batches for index in batch.items}
        for index, item in enumerate(self.items):
            if index not in exchanged:
                found.setdefault(item.holders[0], []).append(index)
        return {rank: tuple(indices) for rank, indices in found.items()}

    @property
    def imbalance(self) -> float:
        """Newton-Schulz operations of the busiest rank over the mean."""
        total = sum(self.loads)
        return max(self.loads) * self.size / total if total else 1.0

    def peers(self, rank: int) -> int:
        """Ranks with which a rank exchanges all-to-all messages: queue pairs, on networks that have them.

        Args:
            rank: Place on the axis.

        Returns:
            Their number.
        """
        found: set[int] = set()
        for batch in self.batches:
            if batch.route is not Route.OWNER:
                continue
            for index, owner in zip(batch.items, batch.owners, strict=True):
                holders = self.items[index].holders
                if owner == rank:
                    found.update(holders)
                elif rank in holders:
                    found.add(owner)
        return len(found - {rank})

    def digest(self) -> str:
        """What must be equal on all ranks, as a number to compare."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """What must be equal on all ranks, one line per fact."""
        lines = [f"{self.axis}: {self.size} ranks, {self.coefficients}, {self.itemsize} bytes a number"]
        lines += [f"{param.spec.name}: {param.spec.shape} cut at {param.cuts}" for param in self.params]
        for batch in self.batches:
            names = ", ".join(
                f"{self.items[index].spec.name} by {owner}"
                for index, owner in zip(batch.items, batch.owners, strict=True)
            )
            lines.append(f"batch {batch.route}: {names}")
        return lines


def share_plan(
    params: Sequence[ShardedParam],
    config: HpMuon,
    *,
    axis: str,
    size: int,
    device: str = "cpu",
    table: Sequence[Rule] | None = None,
    rates: Rates | None = None,
    max_batch_bytes: int = _BATCH_BYTES,
) -> SharePlan:
    """Plan a step over one shard axis.

    Args:
        params: Parameters that Muon updates and ranks of the axis hold, in one order on all of them.
        config: Options.
        axis: Name of the axis.
        size: Ranks on it.
        device: ``cpu``, ``cuda`` or ``npu``.
        table: Which algorithm is fastest for which shape; None for ``config.ns_table`` or the built-in one.
        rates: By which ``strategy=auto`` chooses; None takes the device's default.
        max_batch_bytes: Largest size of what is exchanged at once, but at least one item per rank.

    Returns:
        The plan; equal input gives an equal plan.

    Raises:
        ConfigError: If ``strategy=alltoall`` needs more than ``max_peers`` peers.
    """
    if table is None:
        table = load_table(Path(config.ns_table)) if config.ns_table else TABLE
    coefficients = resolve_schedule(config.schedule, steps=config.steps, custom=config.coefficients)
    items = [item for index, param in enumerate(params) for item in items_of(index, param)]
    known: dict[object, Kind] = {}
    kinds = []
    for item in items:
        key = item.spec.view
        if key not in known:
            known[key] = kind_of(item.spec, coefficients, device=device, table=table, dtype=config.ns_dtype)
        kinds.append(known[key])
    itemsize = 4 if config.comm_dtype is FloatDtype.float32 else 2
    planner = _Planner(items, kinds, size, config, rates or DEFAULT_RATES.get(device, DEFAULT_RATES["cuda"]), itemsize)
    routes = planner.routes()
    owners, loads = planner.owners(routes)
    batches = planner.batches(routes, owners, max_batch_bytes)
    plan = SharePlan(
        axis,
        size,
        tuple(params),
        tuple(items),
        tuple(kinds),
        tuple(batches),
        coefficients,
        planner.rates,
        itemsize,
        tuple(loads),
    )
    if config.max_peers is not None and config.strategy is Strategy.alltoall:
        _check_peers(plan, config.max_peers)
    return plan


def _check_peers(plan: SharePlan, max_peers: int) -> None:
    most = max((plan.peers(rank) for rank in range(plan.size)), default=0)
    if most > max_peers:
        raise ConfigError(
            "optimizer.max_peers",
            max_peers,
            f"strategy=alltoall makes a rank of {plan.axis} exchange with {most} others",
            "take strategy=allgather_dedup, which needs no connections between all pairs, or allow more",
        )


class _Planner:
    """Routes, owners and batches of the items that are cut."""

    def __init__(
        self, items: Sequence[Item], kinds: Sequence[Kind], size: int, config: HpMuon, rates: Rates, itemsize: int
    ) -> None:
        self.rates = rates
        self._items, self._kinds, self._size, self._config, self._itemsize = items, kinds, size, config, itemsize
        self._cut = [index for index, item in enumerate(items) if item.is_cut]
        self._is_float32 = config.ns_dtype in (None, FloatDtype.float32)
        self._has_few_peers = config.max_peers is not None and size - 1 > config.max_peers

    def routes(self) -> dict[int, Route]:
        """The route of every cut item: equal ones go together."""
        classes: dict[object, list[int]] = {}
        for index in self._cut:
            item = self._items[index]
            classes.setdefault((item.spec.view, item.spec.split, item.is_cut_between_rows), []).append(index)
        found = {}
        for members in classes.values():
            route = self._route(members)
            found.update(dict.fromkeys(members, route))
        return found

    def _route(self, members: Sequence[int]) -> Route:
        index = members[0]
        priced = prices(
            self._items[index],
            len(members),
            self._size,
            self._kinds[index],
            itemsize=self._itemsize,
            can_factor=self._is_float32,
        )
        if self._config.strategy is Strategy.auto:
            allowed = [Route(name) for name in priced]
            if self._has_few_peers:
                allowed.remove(Route.OWNER)
        else:
            allowed = [route for route in _ROUTES[self._config.strategy] if route in priced]
            if not allowed:
                allowed = [route for route in (Route.OWNER, Route.UPDATES) if not self._has_few_peers or route.gathers]
                allowed = allowed[:1]
        return min(allowed, key=lambda route: (priced[route].seconds(self.rates), list(Route).index(route)))

    def owners(self, routes: dict[int, Route]) -> tuple[dict[int, int], list[float]]:
        """Owners of the cut items, and the operations of each rank."""
        fixed = [0.0] * self._size
        for index, item in enumerate(self._items):
            if index not in routes and item.numel:
                fixed[item.holders[0]] += self._kinds[index].flops
        for index, route in routes.items():
            kind, item = self._kinds[index], self._items[index]
            for rank in item.holders:
                if route is Route.EVERYWHERE:
                    fixed[rank] += kind.flops
                elif route.has_factors:  # each holder applies factors to its part
                    times = kind.runs if route is Route.GRAM else 1
                    fixed[rank] += times * kind.apply_flops * item.held(rank) / item.numel
                    if route is Route.GRAM:
                        fixed[rank] += times * kind.apply_flops * item.held(rank) / item.numel
            if route is Route.GATHERED_GRAM:
                fixed = [load + kind.apply_flops / self._size for load in fixed]
        shared = [index for index in routes if routes[index] is not Route.EVERYWHERE]
        # what a rank has to do anyway is an item that it alone may own
        costs = [self._owned_flops(index, routes[index]) for index in shared]
        preferred = [self._items[index].holders for index in shared]
        allowed = None
        if self._has_few_peers:
            every = tuple(range(self._size))
            allowed = [
                holders if routes[index] is Route.OWNER else every
                for index, holders in zip(shared, preferred, strict=True)
            ]
        division = divide(costs, self._size, preferred=preferred, allowed=allowed, already=fixed)
        owners = dict(zip(shared, division.owners, strict=True))
        owners.update({index: self._items[index].holders[0] for index in routes if index not in owners})
        return owners, list(division.loads)

    def _owned_flops(self, index: int, route: Route) -> float:
        kind = self._kinds[index]
        if route is Route.FACTORS:
            return kind.apply_flops + kind.gram_flops
        return kind.gram_flops if route.has_factors else kind.flops

    def batches(self, routes: dict[int, Route], owners: dict[int, int], max_bytes: int) -> list[Batch]:
        """Batches of one route each, the costliest items first, so that each has work for all ranks."""
        found = []
        for route in Route:
            members = [index for index in self._cut if routes[index] is route]
            members.sort(key=lambda index: (-self._owned_flops(index, route), index))
            taken: list[int] = []
            used = 0
            for index in members:
                size = self._items[index].numel * self._itemsize
                if len(taken) >= self._size and used + size > max_bytes:
                    found.append(taken)
                    taken, used = [], 0
                taken.append(index)
                used += size
            if taken:
                found.append(taken)
        return [Batch(routes[taken[0]], tuple(taken), tuple(owners[index] for index in taken)) for taken in found]


def with_strategy(config: HpMuon, strategy: Strategy) -> HpMuon:
    """The same options with another strategy, for comparisons.

    Args:
        config: Options.
        strategy: The other one.

    Returns:
        A copy.
    """
    return replace(config, strategy=strategy)
