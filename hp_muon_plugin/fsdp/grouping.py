"""Which buckets are reduced between replicas together, and who updates what."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.outer import Group
from hp_muon_plugin.layout.fusing import fuse
from hp_muon_plugin.layout.owners import Balance
from hp_muon_plugin.platform.collectives import AxisGroup


def make_groups(buckets: Sequence[Bucket], mode: OuterMode, least_bytes: int | None) -> list[Group]:
    """Fuse neighbouring buckets.

    Args:
        buckets: Trainable buckets in the order in which backward reaches them.
        mode: What replicas do.
        least_bytes: A group is closed when it holds this much. None: see :func:`fuse`.

    Returns:
        Groups; each bucket is in exactly one.
    """
    items = [(bucket, _key(bucket), bucket.layout.shard_numel * bucket.reduce_dtype.itemsize) for bucket in buckets]
    groups = [_group(fused, mode) for fused in fuse(items, least_bytes)]
    _assign_owners(groups)
    return groups


def _assign_owners(groups: Sequence[Group]) -> None:
    """Divide the parameters of each shard over replicas, in buffer order as far as that is even.

    Groups with large parameters choose first, as others can make up for them; then those that backward reaches next
    to them. Depends on layouts only, so that all ranks of a shard group agree on the owner of a parameter.
    """
    balances: dict[object, Balance] = {}
    owned = [group for group in reversed(groups) if group.compute is not None]
    for group in sorted(owned, key=lambda group: -max(max(held.values(), default=0) for held in _held(group))):
        mesh, total = group.buckets[0].mesh, max(1, group.grad.numel())
        balance = balances.setdefault(_key(group.buckets[0]), Balance(mesh.replicate.size, mesh.shard.size))
        size = mesh.replicate.size
        guess = [min(size - 1, center * size // total) for center in _centers(group)]
        group.take_owners(balance.divide(_held(group), guess))


def _held(group: Group) -> list[dict[int, int]]:
    """Elements of each parameter on each rank of the shard axis that has any."""
    found = []
    for bucket in group.buckets:
        for index, placement in enumerate(bucket.layout.placements):
            spans = [bucket.layout.span(index, shard) for shard in range(bucket.shard_axis.size)]
            held = {shard: stop - start for shard, (start, stop) in enumerate(spans) if stop > start}
            found.append(held if bucket.is_sharded else dict.fromkeys(range(bucket.mesh.shard.size), placement.numel))
    return found


def _centers(group: Group) -> list[int]:
    """The middle of each parameter in the shard that holds most of it, from the start of the group."""
    found = []
    for bucket in group.buckets:
        for index in range(len(bucket.parameters)):
            spans = [bucket.layout.span(index, shard) for shard in range(bucket.shard_axis.size)]
            shard = max(range(len(spans)), key=lambda shard: spans[shard][1] - spans[shard][0])
            start, stop = spans[shard]
            found.append(group.place(bucket) + bucket.layout.place_in_shard(index, shard) + (stop - start) // 2)
    return found


def _key(bucket: Bucket) -> tuple[AxisGroup, AxisGroup, torch.dtype, torch.dtype, torch.dtype, float]:
    mesh = bucket.mesh
    dtypes = bucket.reduce_dtype, bucket.compute_dtype, bucket.master.dtype
    return mesh.replicate, mesh.shard, *dtypes, bucket.divisor


def _group(buckets: list[Bucket], mode: OuterMode) -> Group:
    first, axis = buckets[0], buckets[0].mesh.replicate
    numel = sum(bucket.layout.shard_numel for bucket in buckets)
    grad = torch.zeros(numel, dtype=first.reduce_dtype, device=first.master.device)
    group = Group(buckets, axis, mode if axis.size > 1 else OuterMode.replicate, grad)
    if group.mode is not OuterMode.replicate:
        group.compute = torch.empty(numel, dtype=first.compute_dtype, device=first.master.device)
    start = 0
    for bucket in buckets:
        stop = start + bucket.layout.shard_numel
        bucket.attach_grad(grad[start:stop])
        if group.compute is not None:
            bucket.rebase(group.compute[start:stop])
        start = stop
    return group
