"""Where every item lies in the messages of a batch, and how many bytes these are. No torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.plan import Batch, Route, SharePlan

SMALL_BYTES = 4  # Gram matrices, factors and largest entries are float32
_PADDING_WORTH_A_MESSAGE = 1.25


@dataclass(frozen=True)
class Messages:
    """The messages of one batch, as every rank of the axis knows them.

    Attributes:
        plan: The plan.
        batch: One of its batches.
    """

    plan: SharePlan
    batch: Batch

    @property
    def items(self) -> Iterator[tuple[int, Item, int]]:
        """``(index, item, owner)`` in the order of the messages."""
        for index, owner in zip(self.batch.items, self.batch.owners, strict=True):
            yield index, self.plan.items[index], owner

    @cached_property
    def gathered(self) -> tuple[int, list[dict[int, int]]]:
        """Of an all-gather of parts: its length per rank, and for each rank where its part of an item begins."""
        places: list[dict[int, int]] = []
        longest = 0
        for rank in range(self.plan.size):
            place, mine = 0, {}
            for index, item, _ in self.items:
                mine[index] = place
                place += item.held(rank)
            places.append(mine)
            longest = max(longest, place)
        return longest, places

    def exchanged(self, source: int, target: int) -> list[tuple[int, int, int]]:
        """What ``source`` holds of what ``target`` owns.

        Args:
            source: Place on the axis.
            target: Place on the axis.

        Returns:
            ``(item, start, stop)``, counted from the item's start, without empty ones.
        """
        return [
            (index, *item.span(source)) for index, item, owner in self.items if owner == target and item.held(source)
        ]

    def exchanged_numel(self, source: int, target: int) -> int:
        """Elements of :meth:`exchanged`; none with oneself, as these are not sent."""
        if source == target:
            return 0
        return sum(stop - start for _, start, stop in self.exchanged(source, target))

    @cached_property
    def whole(self) -> tuple[int, dict[int, int]]:
        """Of results: elements of an owner's items, at most, and where an item begins among its owner's."""
        return self._by_owner({index: item.numel for index, item, _ in self.items})

    @cached_property
    def small(self) -> tuple[int, dict[int, int]]:
        """The same for Gram matrices and factors; an owner's matrices of one side lie next to each other."""
        return self._by_owner({index: side(item) ** 2 for index, item, _ in self.items}, by_size=True)

    def _by_owner(self, sizes: dict[int, int], *, by_size: bool = False) -> tuple[int, dict[int, int]]:
        used: Counter[int] = Counter()
        places = {}
        for index, _, owner in sorted(self.items, key=lambda told: sizes[told[0]]) if by_size else self.items:
            places[index] = used[owner]
            used[owner] += sizes[index]
        return max(used.values(), default=0), places

    @cached_property
    def is_broadcast(self) -> bool:
        """Whether results are sent by one broadcast per owner: where padding to equal lengths would cost more."""
        total = sum(item.numel for _, item, _ in self.items)
        return self.plan.size * self.whole[0] > _PADDING_WORTH_A_MESSAGE * total

    def traffic(self, rank: int) -> dict[str, tuple[int, int]]:
        """What a rank issues in a step, counted as :class:`~hp_muon_plugin.platform.counting.CountingWire` does.

        Args:
            rank: Place on the axis.

        Returns:
            ``(collectives, bytes)`` by name of the collective: whole buffers, and of an all-to-all what
            the rank sends to others.
        """
        plan, route = self.plan, self.batch.route
        found: dict[str, tuple[int, int]] = {}

        def add(name: str, num_bytes: int) -> None:
            number, before = found.get(name, (0, 0))
            found[name] = number + 1, before + num_bytes

        if route.gathers and self.gathered[0]:
            add("all_gather", plan.size * self.gathered[0] * plan.itemsize)
        if route is Route.OWNER:
            ranks = range(plan.size)
            add("all_to_all", plan.itemsize * sum(self.exchanged_numel(rank, other) for other in ranks))
            add("all_to_all", plan.itemsize * sum(self.exchanged_numel(other, rank) for other in ranks))
        if route is Route.UPDATES:
            if self.is_broadcast:
                for owner in sorted(set(self.batch.owners)):
                    add("broadcast", plan.itemsize * self.owned_numel(owner))
            else:
                add("all_gather", plan.size * self.whole[0] * plan.itemsize)
        if route in (Route.GRAM, Route.GATHERED_GRAM):
            add("all_gather", plan.size * len(self.batch.items) * SMALL_BYTES)
            for _ in range(self.num_runs):
                add("reduce_scatter", plan.size * self.small[0] * SMALL_BYTES)
        if route.has_factors:
            for _ in range(self.num_runs):
                add("all_gather", plan.size * self.small[0] * SMALL_BYTES)
        return found

    @property
    def num_runs(self) -> int:
        """Rounds of Gram matrices and factors."""
        return self.plan.kinds[self.batch.items[0]].runs

    def owned_numel(self, owner: int) -> int:
        """Elements of the items of one owner."""
        return sum(item.numel for _, item, other in self.items if other == owner)


def side(item: Item) -> int:
    """The short side of an item of one matrix; 0 for any other.

    Args:
        item: The item.

    Returns:
        Rows or columns.
    """
    return min(item.matrix or (0, 0))


def traffic(plan: SharePlan, rank: int) -> dict[str, tuple[int, int]]:
    """What a rank issues in a step; see :meth:`Messages.traffic`.

    Args:
        plan: The plan.
        rank: Place on its axis.

    Returns:
        ``(collectives, bytes)`` by name of the collective.
    """
    found: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for batch in plan.batches:
        for name, (number, num_bytes) in Messages(plan, batch).traffic(rank).items():
            found[name] += number
            sent[name] += num_bytes
    return {name: (found[name], sent[name]) for name in found}


def received_bytes(plan: SharePlan, rank: int) -> int:
    """Bytes that arrive at a rank in a step, from the formulas of :mod:`cost` with the plan's padding.

    Args:
        plan: The plan.
        rank: Place on its axis.

    Returns:
        Bytes.
    """
    total = 0
    for batch in plan.batches:
        messages = Messages(plan, batch)
        for name, (_, num_bytes) in messages.traffic(rank).items():
            if name == "all_to_all":
                continue
            if name == "broadcast":
                total += num_bytes - plan.itemsize * messages.owned_numel(rank)
            else:
                total += num_bytes * (plan.size - 1) // plan.size
        if batch.route is Route.OWNER:  # what is sent one way comes back the other way
            ranks = range(plan.size)
            both = sum(messages.exchanged_numel(rank, o) + messages.exchanged_numel(o, rank) for o in ranks)
            total += plan.itemsize * both
    return total
