"""Which replica updates which parameter of a planned layout: what fsdp/outer.py does, without its tensors.

A test on every lane compares the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.layout.bucket import BucketLayout
from hp_muon_plugin.models.shard_plan import PlannedBucket, ShardPlan

_GROUPS = 8
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 32 << 20


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
    owners: dict[int, tuple[int, ...]] = {}
    for turn, group in enumerate(_groups(plan)):
        owners |= _owners(group, turn, plan.options.replicas)
    return [OwnedBucket(bucket, owners[id(bucket)]) for bucket in plan.buckets]


def _groups(plan: ShardPlan) -> Iterator[list[PlannedBucket]]:
    """Buckets that are reduced between replicas together, as ``make_groups`` fuses them."""
    reach = [bucket for unit in reversed(plan.units) for bucket in unit.buckets]
    total = sum(bucket.layout.shard_numel for bucket in reach) * plan.grad_bytes
    stated = plan.options.outer_bucket_mib
    least = min(_MOST_BYTES, max(_LEAST_BYTES, total // _GROUPS)) if stated is None else int(stated * 2**20)
    pending: dict[bool, list[PlannedBucket]] = {}
    for bucket in reach:
        group = pending.setdefault(bucket.is_expert, [])
        group.append(bucket)
        if sum(other.layout.shard_numel for other in group) * plan.grad_bytes >= least:
            yield pending.pop(bucket.is_expert)
    yield from pending.values()


def _owners(group: list[PlannedBucket], turn: int, replicas: int) -> dict[int, tuple[int, ...]]:
    place, found = 0, {}
    total = max(1, sum(bucket.layout.shard_numel for bucket in group))
    for bucket in group:
        centers = [place + _center(bucket.layout, index) for index in range(len(bucket.layout.placements))]
        found[id(bucket)] = tuple((min(replicas - 1, c * replicas // total) + turn) % replicas for c in centers)
        place += bucket.layout.shard_numel
    return found


def _center(layout: BucketLayout, index: int) -> int:
    """The middle of a parameter in the shard that holds most of it; the first of several."""
    pieces = layout.cuts(index).pieces()
    shard, start, stop = max(pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]), default=(0, 0, 0))
    return layout.place_in_shard(index, shard) + (stop - start) // 2
