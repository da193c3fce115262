"""Where every item lies in the messages of a batch, and how many bytes these are. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.plan import Batch, Route, SharePlan

SMALL_BYTES = 4  # Gram matrices, factors and largest entries are float32
_PADDING_WORTH_A_MESSAGE = 1.25


class _Places(dict[int, int]):
    """Where items begin in a rank's message; 0 for those of which it holds nothing."""

    def __missing__(self, key: int) -> int:
        return 0


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
        places: list[dict[int, int]] = [_Places() for _ in range(self.plan.size)]
        used = [0] * self.plan.size
        for index, item, _ in self.items:
            for rank, start, stop in item.cuts.pieces():
                places[rank][index] = used[rank]
                used[rank] += stop - start
        return self.longest, places

    @cached_property
    def held(self) -> Counter[int]:
        """Elements of the batch that each rank holds."""
        found = Counter[int]()
        for cuts, times in Counter(item.cuts for _, item, _ in self.items).items():  # most are cut alike
            for rank, start, stop in cuts.pieces():
                found[rank] += times * (stop - start)
        return found

    @property
    def longest(self) -> int:
        """Elements of an all-gather of parts, per rank."""
        return max(self.held.values(), default=0)

    @cached_property
    def _exchanges(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, item, owner in self.items:
            for rank, start, stop in item.cuts.pieces():
                found.setdefault((rank, owner), []).append((index, start, stop))
        return found

    def exchanged(self, source: int, target: int) -> Sequence[tuple[int, int, int]]:
        """What ``source`` holds of what ``target`` owns.

        Args:
            source: Place on the axis.
            target: Place on the axis.

        Returns:
            ``(item, start, stop)``, counted from the item's start, without empty ones.
        """
        return self._exchanges.get((source, target), ())

    def exchanged_numel(self, source: int, target: int) -> int:
        """Elements of :meth:`exchanged`; none with oneself, as these are not sent."""
        if source == target:
            return 0
        return sum(stop - start for _, start, stop in self.exchanged(source, target))

    @cached_property
    def _kept(self) -> Counter[int]:
        """Elements that each rank both holds and owns."""
        found = Counter[int]()
        for _, item, owner in self.items:
            found[owner] += item.held(owner)
        return found

    def moved_numel(self, rank: int) -> tuple[int, int]:
        """Elements that a rank sends to owners, and that it receives as one; updates go the other way.

        Args:
            rank: Place on the axis.

        Returns:
            Both.
        """
        return self.held[rank] - self._kept[rank], self.owned[rank] - self._kept[rank]

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

        if route.gathers and self.longest:
            add("all_gather", plan.size * self.longest * plan.itemsize)
        if route is Route.OWNER:
            for numel in self.moved_numel(rank):
                add("all_to_all", plan.itemsize * numel)
        if route is Route.UPDATES:
            if self.is_broadcast:
                for _, numel in sorted(self.owned.items()):
                    add("broadcast", plan.itemsize * numel)
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

    @cached_property
    def owned(self) -> Counter[int]:
        """Elements of the items of each owner."""
        found = Counter[int]()
        for _, item, owner in self.items:
            found[owner] += item.numel
        return found

    def arriving(self, rank: int) -> dict[str, tuple[int, int]]:
        """What arrives at a rank in a step, from the formulas of :mod:`cost` with the padding of messages.

        Args:
            rank: Place on the axis.

        Returns:
            ``(collectives, bytes)`` by name of the collective.
        """
        size, found = self.plan.size, self.traffic(rank)
        for name, (number, num_bytes) in found.items():
            if name == "broadcast":
                found[name] = number, num_bytes - self.plan.itemsize * self.owned[rank]
            elif (
                name != "all_to_all"
            ):  # of which as much arrives as leaves: each part goes one way, its update the other
                found[name] = number, num_bytes * (size - 1) // size
        return found


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
    return _added(Messages(plan, batch).traffic(rank) for batch in plan.batches)


@dataclass(frozen=True, slots=True)
class Arriving:
    """What arrives at a rank in a step.

    Attributes:
        by_name: ``(collectives, bytes)`` by name of the collective.
        num_messages: Collectives, and for each all-to-all its peers.
    """

    by_name: dict[str, tuple[int, int]]
    num_messages: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(num_bytes for _, num_bytes in self.by_name.values())

    def also(self, name: str, number: int, num_bytes: int) -> "Arriving":
        """The same and other collectives.

        Args:
            name: Their name.
            number: How many; one message each.
            num_bytes: What arrives by them.

        Returns:
            Both together.
        """
        return Arriving(_added([self.by_name, {name: (number, num_bytes)}]), self.num_messages + number)


def arriving(plan: SharePlan) -> list[Arriving]:
    """What arrives at every rank of an axis in a step; see :meth:`Messages.arriving`.

    Args:
        plan: The plan.

    Returns:
        By place on the axis.
    """
    every = [Messages(plan, batch) for batch in plan.batches]
    found = []
    for rank in range(plan.size):
        by_name = _added(messages.arriving(rank) for messages in every)
        peers = {name: plan.peers(rank) if name == "all_to_all" else 1 for name in by_name}
        found.append(Arriving(by_name, sum(number * peers[name] for name, (number, _) in by_name.items())))
    return found


def received_bytes(plan: SharePlan, rank: int) -> int:
    """Bytes that arrive at a rank in a step; see :meth:`Messages.arriving`.

    Args:
        plan: The plan.
        rank: Place on its axis.

    Returns:
        Bytes.
    """
    told = _added(Messages(plan, batch).arriving(rank) for batch in plan.batches)
    return sum(num_bytes for _, num_bytes in told.values())


def _added(told: Iterable[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for counts in told:
        for name, (number, num_bytes) in counts.items():
            before, so_far = found.get(name, (0, 0))
            found[name] = before + number, so_far + num_bytes
    return found
