"""Making a plan: from layouts alone, the same on every rank.

No tensors and no process group: the plan of a run on thousands of ranks is made on one machine, in time that
grows with the parameters and with the number of pieces that ranks cut them into, not with their product.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from hp_muon_plugin.config.choices import FloatDtype, Strategy
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.muon.algorithm import Rule
from hp_muon_plugin.muon.balance import divide
from hp_muon_plugin.muon.distributed.cost import Kind, Price, gram_refusal, kind_of, prices
from hp_muon_plugin.muon.distributed.items import Item, ShardedParam, items_of
from hp_muon_plugin.muon.distributed.plan import Batch, Choice, Route, SharePlan
from hp_muon_plugin.muon.rates import Rates, rates_of
from hp_muon_plugin.muon.stability import schedule_and_table

BATCH_BYTES = 64 << 20

# What takes the place of a strategy for items for which it is not possible, in order of preference.
_ROUTES: dict[Strategy, tuple[Route, ...]] = {
    Strategy.allgather: (Route.EVERYWHERE,),
    Strategy.allgather_dedup: (Route.UPDATES, Route.FACTORS),
    Strategy.alltoall: (Route.OWNER,),
    Strategy.gram: (Route.GRAM, Route.GATHERED_GRAM),
}


def share_plan(
    params: Sequence[ShardedParam],
    config: HpMuon,
    *,
    axis: str,
    size: int,
    device: str = "cpu",
    table: Sequence[Rule] | None = None,
    rates: Rates | None = None,
    max_batch_bytes: int = BATCH_BYTES,
) -> SharePlan:
    """Plan a step over one shard axis.

    Args:
        params: Parameters that Muon updates and ranks of the axis hold, in one order on all of them.
        config: Options.
        axis: Name of the axis.
        size: Ranks on it.
        device: ``cpu``, ``cuda`` or ``npu``.
        table: Which algorithm is fastest for which shape; None for ``config.ns_table`` or the built-in one.
        rates: By which ``strategy=auto`` chooses; None takes those of ``config``.
        max_batch_bytes: Largest size of what is exchanged at once, but at least one item per rank.

    Returns:
        The plan; equal input gives an equal plan.

    Raises:
        ConfigError: If ``strategy=alltoall`` needs more than ``max_peers`` peers.
    """
    coefficients, table = schedule_and_table(config, table)
    items = [item for index, param in enumerate(params) for item in items_of(index, param)]
    known: dict[object, Kind] = {}
    kinds = []
    for item in items:
        key = item.spec.view
        if key not in known:
            known[key] = kind_of(item.spec, coefficients, device=device, table=table, dtype=config.ns_dtype)
        kinds.append(known[key])
    itemsize = 4 if config.comm_dtype is FloatDtype.float32 else 2
    planner = _Planner(items, kinds, size, config, rates or rates_of(config.rates, device), itemsize)
    choices = planner.choices()
    routes = {index: choice.route for choice in choices for index in choice.items}
    owners, loads = planner.owners(routes)
    batches = planner.batches(routes, owners, max_batch_bytes)
    plan = SharePlan(
        axis,
        size,
        tuple(params),
        tuple(items),
        tuple(kinds),
        tuple(batches),
        tuple(choices),
        coefficients,
        planner.rates,
        itemsize,
        tuple(loads),
    )
    if config.max_peers is not None and config.strategy is Strategy.alltoall:
        _check_peers(plan, config.max_peers)
    return plan


def _check_peers(plan: SharePlan, max_peers: int) -> None:
    most = plan.most_peers
    if most > max_peers:
        raise ConfigError(
            "optimizer.max_peers",
            max_peers,
            f"strategy=alltoall makes a rank of {plan.axis} exchange with {most} others",
            "take strategy=allgather_dedup, which needs no connections between all pairs, or allow more",
        )


def cheapest_together(
    priced: Sequence[Mapping[str, Price]], rates: Rates, *, forbidden: Sequence[Route] = ()
) -> list[Route]:
    """The routes of several kinds of items that cost least together.

    Items of one route share its messages, whatever their kinds, and ranks that own none of one kind own others. So
    each set of routes is priced: every kind takes the route of the set that moves and computes least, the messages
    of each route that is taken count once, and no rank computes less than the largest item.

    Args:
        priced: Price of each route that is possible, for each kind.
        rates: Of a rank.
        forbidden: Routes that are not to be taken.

    Returns:
        One route for each kind.
    """
    best: tuple[float, list[Route]] | None = None
    possible = [route for route in Route if route not in forbidden]
    for count in range(1, len(possible) + 1):
        for allowed in combinations(possible, count):
            routes = []
            for each in priced:
                among = [route for route in allowed if route in each]
                if not among:
                    break
                routes.append(min(among, key=lambda route: (each[route].seconds(rates, with_messages=False), route)))
            if len(routes) < len(priced):
                continue
            taken = [each[route] for route, each in zip(routes, priced, strict=True)]
            received = sum(price.bytes_received for price in taken)
            flops = max(sum(price.flops for price in taken), *(price.item_flops for price in taken), 0.0)
            messages = {route: 0 for route in routes}
            for route, price in zip(routes, taken, strict=True):
                messages[route] = max(messages[route], price.messages)
            seconds = Price(received, flops, sum(messages.values())).seconds(rates)
            if best is None or seconds < best[0]:
                best = (seconds, routes)
    return best[1] if best else []


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

    def choices(self) -> list[Choice]:
        """The route of every cut item: equal ones go together."""
        classes: dict[object, list[int]] = {}
        for index in self._cut:
            item = self._items[index]
            classes.setdefault((item.spec.view, item.spec.split, item.is_cut_between_rows), []).append(index)
        members = [tuple(found) for found in classes.values()]
        priced = [
            prices(
                [self._items[index] for index in found],
                self._size,
                self._kinds[found[0]],
                itemsize=self._itemsize,
                can_factor=self._is_float32,
                has_others=len(members) > 1,
            )
            for found in members
        ]
        if self._config.strategy is Strategy.auto:
            routes = cheapest_together(priced, self.rates, forbidden=(Route.OWNER,) if self._has_few_peers else ())
        else:
            routes = [self._route(each) for each in priced]
        return [
            Choice(found, route, tuple(each.items()), self._refusal(found[0], route))
            for found, route, each in zip(members, routes, priced, strict=True)
        ]

    def _refusal(self, index: int, route: Route) -> str:
        if self._config.strategy is not Strategy.gram or route in _ROUTES[Strategy.gram]:
            return ""
        return gram_refusal(self._items[index], self._kinds[index], can_factor=self._is_float32)

    def _route(self, priced: Mapping[str, Price]) -> Route:
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
        whole, part = dict[Cuts, float](), dict[Cuts, float]()  # most items are cut alike, one in each layer
        for index, route in routes.items():
            kind, item = self._kinds[index], self._items[index]
            if route is Route.EVERYWHERE:
                whole[item.cuts] = whole.get(item.cuts, 0.0) + kind.flops
            elif route.has_factors:  # each holder applies factors to its part, and may form its Gram matrix
                times = 2 * kind.runs if route is Route.GRAM else 1
                part[item.cuts] = part.get(item.cuts, 0.0) + times * kind.apply_flops / item.numel
        for cuts in dict.fromkeys([*whole, *part]):
            for rank, start, stop in cuts.pieces():
                fixed[rank] += whole.get(cuts, 0.0) + part.get(cuts, 0.0) * (stop - start)
        everyones = sum(self._kinds[i].apply_flops for i, route in routes.items() if route is Route.GATHERED_GRAM)
        fixed = [load + everyones / self._size for load in fixed]
        shared = [index for index in routes if routes[index] is not Route.EVERYWHERE]
        # what a rank has to do anyway is an item that it alone may own
        costs = [self._owned_flops(index, routes[index]) for index in shared]
        holders = {cuts: cuts.holders for cuts in {self._items[index].cuts for index in shared}}
        preferred = [holders[self._items[index].cuts] for index in shared]
        allowed = None
        if self._has_few_peers:
            allowed = [
                among if routes[index] is Route.OWNER else None for index, among in zip(shared, preferred, strict=True)
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
        """Batches of one route each, of items of like costs, so that each has work for all ranks.

        Those come first of which backward has all gradients first.
        """
        found = []
        for route in Route:
            members = [index for index in self._cut if routes[index] is route]
            # of equal ones the last first: their gradients are
            members.sort(key=lambda index: (-self._owned_flops(index, route), -index))
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
        found.sort(key=lambda taken: -min(self._items[index].param for index in taken))
        return [Batch(routes[taken[0]], tuple(taken), tuple(owners[index] for index in taken)) for taken in found]
