"""Where the parameters of a sharded model lie, for optimizers that need more than their own part."""

from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.schedule import Schedule
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.muon.distributed.shards import ShardOf


def placed_shards(schedule: Schedule) -> list[ShardOf]:
    """Every parameter of a model, in the order of the units.

    Args:
        schedule: The model's.

    Returns:
        One entry for each, also for those of which this rank holds nothing.
    """
    return [
        ShardOf(
            parameter.sharded,
            tuple(parameter.shape),
            cuts(bucket, index),
            bucket.shard_axis,
            bucket.mesh.replicate,
            is_owned(schedule, bucket, index),
        )
        for unit in schedule.units
        for bucket in unit.buckets
        for index, parameter in enumerate(bucket.parameters)
    ]


def cuts(bucket: Bucket, index: int) -> Cuts:
    """Which elements of a parameter each rank of the shard axis holds.

    Args:
        bucket: Its bucket.
        index: Its place among the bucket's parameters.

    Returns:
        ``(ranks + 1,)``, ascending; rank i holds elements ``cuts[i]`` to ``cuts[i + 1]``.
    """
    assert bucket.layout.num_shards == bucket.shard_axis.size, bucket.layout
    return bucket.layout.cuts(index)


def is_owned(schedule: Schedule, bucket: Bucket, index: int) -> bool:
    """Whether this replica updates a parameter.

    Args:
        schedule: The model's.
        bucket: Its bucket.
        index: Its place among the bucket's parameters.

    Returns:
        True for every parameter with ``outer=replicate``, for one replica's with other modes.
    """
    if not bucket.is_trainable:
        return True
    owners = schedule.reducer.group_of(bucket).owners(bucket)
    return owners is None or owners[index] == bucket.mesh.replicate.index
