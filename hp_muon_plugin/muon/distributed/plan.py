"""The plan of a Muon step over one shard axis: what every rank knows of it. No torch.

Items that lie whole on a rank are its own. The others are exchanged in batches; each batch has one route,
an owner for every item, and messages whose bytes are known before anything is sent (messages.py).
planner.py makes plans.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.distributed.cost import Kind, Price
from hp_muon_plugin.muon.distributed.items import Item, ShardedParam
from hp_muon_plugin.muon.rates import Rates

UNDER_WAY = 2
"""Batches that are under way at a time, each in a set of buffers of its own."""


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


@dataclass(frozen=True, slots=True)
class Choice:
    """Equal items that are cut, and why they go the way they do.

    Attributes:
        items: Indices into ``SharePlan.items``.
        route: The route taken.
        prices: Of every possible route, by its name.
        refusal: Why a named strategy was not taken; empty if it was, or if prices chose.
    """

    items: tuple[int, ...]
    route: Route
    prices: tuple[tuple[str, Price], ...]
    refusal: str = ""


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
        choices: What is cut, by kind; batches follow from them.
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
    choices: tuple[Choice, ...]
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
        return self._peers.get(rank, 0)

    @cached_property
    def _peers(self) -> dict[int, int]:
        numbers: dict[Cuts, int] = {}  # of items that are cut alike; a hash takes as long as they have ends
        owners: list[set[int]] = []
        owned: dict[int, set[int]] = {}
        for batch in self.batches:
            for index, owner in zip(batch.items, batch.owners, strict=True) if batch.route is Route.OWNER else ():
                number = numbers.setdefault(self.items[index].cuts, len(numbers))
                if number == len(owners):
                    owners.append(set())
                owners[number].add(owner)
                owned.setdefault(owner, set()).add(number)
        holders = [frozenset(cuts.holders) for cuts in numbers]
        held: dict[int, list[int]] = {}
        for number, ranks in enumerate(holders):
            for rank in ranks:
                held.setdefault(rank, []).append(number)
        found = {}
        for rank in dict.fromkeys([*held, *owned]):
            peers = set[int]().union(*(owners[number] for number in held.get(rank, ())))
            found[rank] = len(peers.union(*(holders[number] for number in owned.get(rank, ()))) - {rank})
        return found

    @property
    def most_peers(self) -> int:
        """:meth:`peers` of the rank with most."""
        return max(self._peers.values(), default=0)

    def digest(self) -> str:
        """What must be equal on all ranks, as a number to compare."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self) -> list[str]:
        """What must be equal on all ranks, one line per fact."""
        lines = [f"{self.axis}: {self.size} ranks, {self.coefficients}, {self.itemsize} bytes a number"]
        told = {cuts: str(cuts) for cuts in {param.cuts for param in self.params}}
        lines += [f"{param.spec.name}: {param.spec.shape} cut at {told[param.cuts]}" for param in self.params]
        for batch in self.batches:
            names = ", ".join(
                f"{self.items[index].spec.name} by {owner}"
                for index, owner in zip(batch.items, batch.owners, strict=True)
            )
            lines.append(f"batch {batch.route}: {names}")
        return lines
