"""Which replica updates which parameter of a planned layout: what fsdp/grouping.py does, without its tensors.

A test on every lane compares the two.
"""

from dataclasses import dataclass

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.layout.fusing import fuse
from hp_muon_plugin.layout.owners import Balance
from hp_muon_plugin.models.shard_plan import PlannedBucket, ShardPlan


@dataclass(frozen=True, slots=True)
class OwnedBucket:
    """A bucket and its owners.

    Attributes:
        bucket: The bucket.
        owners: The replica that updates each parameter, in buffer order; None if every replica does.
    """

    bucket: PlannedBucket
    owners: tuple[int, ...] | None


def owned_buckets(plan: ShardPlan) -> list[OwnedBucket]:
    """The buckets of a plan with the owners of their parameters.

    Args:
        plan: The layout.

    Returns:
        Buckets in the plan's order.
    """
    if plan.options.outer is OuterMode.replicate or plan.options.replicas == 1:
        return [OwnedBucket(bucket, None) for bucket in plan.buckets]
    owners: dict[int, list[int]] = {}
    balances: dict[bool, Balance] = {}
    groups = [_Group.of(group) for group in _groups(plan)]
    for group in sorted(reversed(groups), key=lambda group: -max(max(held.values()) for held in group.parts)):
        first = group.buckets[0]
        balance = balances.setdefault(first.is_expert, Balance(plan.options.replicas, first.layout.num_shards))
        found = iter(balance.divide(group.parts, group.guess(plan.options.replicas)))
        for bucket in group.buckets:
            owners[id(bucket)] = [next(found) for _ in bucket.layout.placements]
    return [OwnedBucket(bucket, tuple(owners[id(bucket)])) for bucket in plan.buckets]


def _groups(plan: ShardPlan) -> list[list[PlannedBucket]]:
    """Buckets that are reduced between replicas together, as ``make_groups`` fuses them."""
    reach = [bucket for unit in reversed(plan.units) for bucket in unit.buckets]
    stated = plan.options.outer_bucket_mib
    items = [(bucket, bucket.is_expert, bucket.layout.shard_numel * plan.grad_bytes) for bucket in reach]
    return fuse(items, None if stated is None else int(stated * 2**20))


@dataclass(frozen=True, slots=True)
class _Group:
    """Buckets that are reduced between replicas together.

    Attributes:
        buckets: The buckets.
        parts: Of each parameter, elements by shard.
        centers: The middle of each parameter in the shard that holds most of it, from the start of the group.
    """

    buckets: list[PlannedBucket]
    parts: list[dict[int, int]]
    centers: list[int]

    @classmethod
    def of(cls, buckets: list[PlannedBucket]) -> "_Group":
        parts, centers, place = [], [], 0
        for layout in (bucket.layout for bucket in buckets):
            for index in range(len(layout.placements)):
                held = {shard: stop - start for shard, start, stop in layout.cuts(index).pieces()} or {0: 0}
                shard = max(held, key=lambda shard: held[shard])  # the first of several
                centers.append(place + layout.place_in_shard(index, shard) + held[shard] // 2)
                parts.append(held)
            place += layout.shard_numel
        return cls(buckets, parts, centers)

    def guess(self, replicas: int) -> list[int]:
        """Owners in buffer order."""
        total = max(1, sum(bucket.layout.shard_numel for bucket in self.buckets))
        return [min(replicas - 1, center * replicas // total) for center in self.centers]
