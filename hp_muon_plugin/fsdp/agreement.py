"""Checks that all ranks shard the same model in the same way, before anything else is sent."""

import hashlib
from collections.abc import Sequence

import torch.distributed as dist

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp.policy import ScheduleOptions
from hp_muon_plugin.fsdp.unit import Unit
from hp_muon_plugin.platform.collectives import AxisGroup, gathered_objects


def describe(units: Sequence[Unit], options: ScheduleOptions, mode: OuterMode) -> list[str]:
    """What must be equal on all ranks, one line per fact.

    Args:
        units: All units of a model.
        options: Of its schedule.
        mode: What replicas do.

    Returns:
        Lines; the same on every rank of a right job.
    """
    lines = [f"{options}, outer={mode}, {len(units)} units"]
    for unit in units:
        lines.append(f"unit {unit.name}: {unit.options}, {len(unit.buckets)} buckets")
        for bucket in unit.buckets:
            mesh, layout = bucket.mesh, bucket.layout
            dtypes = f"{bucket.master.dtype} computed in {bucket.compute_dtype} reduced in {bucket.reduce_dtype}"
            lines.append(
                f"bucket of {unit.name}: {mesh.replicate.size} x {mesh.shard.size} ranks, {layout.num_shards} shards "
                f"of {layout.shard_numel}, {dtypes}, trainable {bucket.is_trainable}, divisor {bucket.divisor}"
            )
            lines += [f"{unit.name}.{place.name}: {place.shape} at {place.offset}" for place in layout.placements]
    return lines


def check_agreement(lines: Sequence[str], axes: Sequence[AxisGroup]) -> None:
    """Compare with the other ranks.

    Args:
        lines: From :func:`describe`.
        axes: Axes that together reach all ranks of the model; all of them must call.

    Raises:
        ConfigError: On every rank of an axis on which two differ.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for axis in axes:
        if axis.group is None:
            continue
        digests = gathered_objects(digest, "what is sharded", axis)  # 64 bytes a rank, once per model; the host waits
        if len(set(digests)) > 1:
            _refuse(lines, axis)


def _refuse(lines: Sequence[str], axis: AxisGroup) -> None:
    assert axis.group is not None
    told = gathered_objects(list(lines), "what is sharded", axis)
    other = next(index for index in range(axis.size) if told[index] != told[0])
    pairs = zip([*told[0], "nothing more"], [*told[other], "nothing more"], strict=False)
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    first, second = (dist.get_global_rank(axis.group, index) for index in (0, other))
    raise ConfigError(
        "hp_fully_shard",
        f"rank {first} has '{mine}', rank {second} has '{theirs}'",
        "ranks do not shard the same model in the same way",
        "start every rank with the same options and the same model",
    )
