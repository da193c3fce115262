"""Ranks compare their plans once, before anything is exchanged."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.platform.collectives import AxisGroup


def check_plans(plans: Sequence[tuple[AxisGroup, SharePlan]]) -> None:
    """Compare the plan of each axis over its ranks. All of them must call, in one order of the axes.

    Args:
        plans: Axes and this rank's plans.

    Raises:
        ConfigError: On every rank of an axis on which two plans differ, naming the first difference.
    """
    for axis, plan in plans:
        if axis.group is None:
            continue
        digests: list[Any] = [None] * axis.size
        dist.all_gather_object(digests, plan.digest(), group=axis.group)  # 64 bytes a rank, once; the host waits
        if len(set(digests)) > 1:
            _refuse(axis, plan)


def _refuse(axis: AxisGroup, plan: SharePlan) -> None:
    assert axis.group is not None
    told: list[Any] = [None] * axis.size
    dist.all_gather_object(told, plan.lines(), group=axis.group)
    other = next(index for index in range(axis.size) if told[index] != told[0])
    pairs = zip_longest(told[0], told[other], fillvalue="nothing more")
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    first, second = (dist.get_global_rank(axis.group, index) for index in (0, other))
    raise ConfigError(
        "optimizer",
        f"rank {first} plans '{mine}', rank {second} '{theirs}'",
        f"ranks of {axis.axis} would exchange different matrices",
        "give every rank the same options and the same parameters in the same order",
    )
