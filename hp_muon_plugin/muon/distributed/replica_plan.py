"""Which of several ranks that hold the same weights updates which matrix. No torch.

Each matrix that takes longer to compute than to send has one owner, the longest first to whoever has least; the
others are updated by every rank, and nothing of them is sent. Where the ranks are replicas of shards, each weight that
is worth it has one owner replica, so that replicas have as much to do in all and on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.balance import divide, divide_parts
from hp_muon_plugin.muon.distributed.cost import kind_of
from hp_muon_plugin.muon.distributed.items import Item, ShardedParam, pieces_of
from hp_muon_plugin.muon.rates import Rates, rates_of
from hp_muon_plugin.muon.stability import schedule_and_table

_BYTES = 4
_ALONE_NUMEL = 1 << 20  # 4 MiB in float32: at 100 GB/s as long as two messages, and a copy less on both sides


def is_sent_alone(numel: int) -> bool:
    """Whether a part is so large that it is sent from where it lies; smaller ones share their owner's message.

    Args:
        numel: Its elements.

    Returns:
        True if it has a message of its own and needs no buffer.
    """
    return numel >= _ALONE_NUMEL


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """What ranks do that all hold the same weights.

    Attributes:
        axis: Mesh axis of these ranks.
        size: How many they are.
        divided: Updated once, and then sent.
        owners: Who updates each of those.
        everywhere: Updated by every rank.
        loads: Newton-Schulz operations of each rank.
        undivided_flops: Those of a rank if nothing were divided.
        rates: By which it was decided.
    """

    axis: str
    size: int
    divided: tuple[Item, ...]
    owners: tuple[int, ...]
    everywhere: tuple[Item, ...]
    loads: tuple[float, ...]
    undivided_flops: float
    rates: Rates

    def owned(self, place: int) -> tuple[Item, ...]:
        """What one rank alone updates.

        Args:
            place: The rank's place on the axis.

        Returns:
            Its items.
        """
        return tuple(item for item, owner in zip(self.divided, self.owners, strict=True) if owner == place)

    def updated(self, place: int) -> tuple[Item, ...]:
        """All that one rank updates.

        Args:
            place: The rank's place on the axis.

        Returns:
            Its items.
        """
        return (*self.everywhere, *self.owned(place))

    @property
    def sent_numels(self) -> tuple[int, ...]:
        """Elements of weights that each rank sends to every other one in a step."""
        found = [0] * self.size
        for item, owner in zip(self.divided, self.owners, strict=True):
            found[owner] += item.numel
        return tuple(found)

    @property
    def packed_numels(self) -> tuple[int, ...]:
        """The part of :attr:`sent_numels` that goes in one message, from a buffer."""
        found = [0] * self.size
        for item, owner in zip(self.divided, self.owners, strict=True):
            found[owner] += 0 if is_sent_alone(item.numel) else item.numel
        return tuple(found)

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that are sent in a step, by all owners together, in float32."""
        return _BYTES * sum(item.numel for item in self.divided)

    @property
    def num_messages(self) -> int:
        """Broadcasts of a step: one of each rank that owns something small, and one for each large item."""
        return sum(map(bool, self.packed_numels)) + sum(is_sent_alone(item.numel) for item in self.divided)

    @property
    def most_received_bytes(self) -> int:
        """Bytes of weights that arrive in a step, in float32, at the rank with most."""
        return self.sent_bytes - _BYTES * min(self.sent_numels)


def replica_plan(
    params: Sequence[ParamSpec], config: HpMuon, *, axis: str, size: int, device: str, rates: Rates | None = None
) -> ReplicaPlan:
    """Divide parameters over ranks that all hold them.

    Args:
        params: The parameters, in one order on all of the ranks.
        config: Options.
        axis: Mesh axis of the ranks.
        size: How many they are.
        device: ``cpu``, ``cuda`` or ``npu``.
        rates: By which it is decided what is divided; None takes those of ``config``.

    Returns:
        The plan; equal input gives an equal plan.
    """
    rates = rates or rates_of(config.rates, device)
    items = [item for index, spec in enumerate(params) for item in pieces_of(index, spec, size)]
    flops = item_flops([item.spec for item in items], config, device=device)
    worth = [is_worth_sending(cost, item.numel, size, config, rates) for cost, item in zip(flops, items, strict=True)]
    everywhere = sum(cost for cost, is_sent in zip(flops, worth, strict=True) if not is_sent)
    costs = [cost for cost, is_sent in zip(flops, worth, strict=True) if is_sent]
    division = divide(costs, size, already=[everywhere] * size)
    return ReplicaPlan(
        axis,
        size,
        tuple(item for item, is_sent in zip(items, worth, strict=True) if is_sent),
        division.owners,
        tuple(item for item, is_sent in zip(items, worth, strict=True) if not is_sent),
        division.loads,
        sum(flops),
        rates,
    )


def replica_owners(
    params: Sequence[ShardedParam], config: HpMuon, *, replicas: int, device: str
) -> tuple[int | None, ...]:
    """Divide parameters over replicas of one shard axis, which hold the same shards of all of them.

    Args:
        params: The parameters, in one order on all ranks.
        config: Options.
        replicas: How many there are.
        device: ``cpu``, ``cuda`` or ``npu``.

    Returns:
        For each the replica that updates it and sends the others its new weight, or None if every replica does.
    """
    if replicas == 1 or not params:
        return (None,) * len(params)
    rates = rates_of(config.rates, device)
    costs = item_flops([param.spec for param in params], config, device=device)
    # of a weight, a rank computes and sends its share
    shared = [
        index
        for index, (cost, param) in enumerate(zip(costs, params, strict=True))
        if is_worth_sending(cost, param.spec.numel, replicas, config, rates)
    ]
    parts = [
        {
            place: costs[index] * (stop - start) / params[index].cuts.numel
            for place, start, stop in params[index].cuts.pieces()
        }
        for index in shared
    ]
    owners = dict(zip(shared, divide_parts(parts, replicas, params[0].cuts.size), strict=True))
    return tuple(owners.get(index) for index in range(len(params)))


@dataclass(frozen=True, slots=True)
class SentWeights:
    """New weights that replicas of a shard axis send each other in a step.

    Attributes:
        num_weights: How many.
        numels: Elements of each part by place on the axis, and by the replica that sends; those with nothing are left
            out.
    """

    num_weights: int
    numels: dict[int, dict[int, list[int]]]

    def __bool__(self) -> bool:
        return bool(self.numels)

    def packed(self, place: int) -> dict[int, int]:
        """Elements of the messages that are sent from buffers.

        Args:
            place: Place on the shard axis.

        Returns:
            By the replica that sends.
        """
        told = self.numels.get(place, {})
        return {owner: sum(numel for numel in each if not is_sent_alone(numel)) for owner, each in told.items()}

    def arriving(self, place: int, replica: int) -> tuple[int, int]:
        """What arrives at a rank.

        Args:
            place: Its place on the shard axis.
            replica: Which replica it is in.

        Returns:
            Broadcasts in which it takes part, and bytes that arrive by them, in float32.
        """
        told = self.numels.get(place, {})
        alone = sum(is_sent_alone(numel) for each in told.values() for numel in each)
        arriving = sum(sum(each) for owner, each in told.items() if owner != replica)
        return alone + sum(map(bool, self.packed(place).values())), _BYTES * arriving


def sent_weights(params: Sequence[ShardedParam], owners: Sequence[int | None]) -> SentWeights:
    """What replicas send each other.

    Args:
        params: Parameters of a shard axis.
        owners: As of :func:`replica_owners`.

    Returns:
        The elements, by place and by replica.
    """
    found: dict[int, dict[int, list[int]]] = {}
    for param, owner in zip(params, owners, strict=True):
        if owner is not None:
            for place, start, stop in param.cuts.pieces():
                found.setdefault(place, {}).setdefault(owner, []).append(stop - start)
    return SentWeights(sum(owner is not None for owner in owners), found)


def item_flops(specs: Sequence[ParamSpec], config: HpMuon, *, device: str) -> list[float]:
    """Newton-Schulz operations of parameters.

    Args:
        specs: Whole parameters or stretches of them.
        config: Options.
        device: ``cpu``, ``cuda`` or ``npu``.

    Returns:
        One figure for each.
    """
    coefficients, table = schedule_and_table(config)
    return [kind_of(spec, coefficients, device=device, table=table, dtype=config.ns_dtype).flops for spec in specs]


def is_worth_sending(flops: float, numel: int, size: int, config: HpMuon, rates: Rates) -> bool:
    """Whether to compute an update once and send the weight, instead of computing it on every replica.

    Args:
        flops: Of the update.
        numel: Elements of the weight.
        size: Replicas.
        config: Options; ``divide_replicas`` decides where it is not null.
        rates: Of a rank.

    Returns:
        True if computing takes longer than sending.
    """
    if size == 1 or config.divide_replicas is not None:
        return size > 1 and bool(config.divide_replicas)
    return flops / rates.flops > _BYTES * numel / rates.from_replicas
