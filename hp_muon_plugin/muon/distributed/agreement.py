"""Ranks compare their options, parameters and plans once, before anything is exchanged."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest

import torch.distributed as dist

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.routing import Route
from hp_muon_plugin.platform.collectives import AxisGroup, gathered_objects

_OF_A_MACHINE = ("_target_", "name", "ns_table")  # paths may differ; what is in the table is seen in plans
_Told = dict[str, tuple[int, list[str]]]  # by digest: a rank, and its lines or nothing


def check_job(config: HpMuon, routes: Sequence[Route], axes: Iterable[AxisGroup]) -> None:
    """Compare options, parameters and who updates them. All ranks of the axes must call, in one order of these.

    Args:
        config: Options.
        routes: Of all parameters, also frozen ones.
        axes: Axes that together reach all ranks of the model.

    Raises:
        ConfigError: On every rank of an axis on which two ranks differ, naming the first difference.
    """
    lines = [f"{f.name}={getattr(config, f.name)}" for f in fields(config) if f.name not in _OF_A_MACHINE]
    lines += [
        f"{route.spec.name}: {route.spec.shape} by {route.algorithm}, trainable={route.spec.trainable}"
        for route in routes
    ]
    _compare(list(axes), lines, "has", "ranks would train different models")


def check_plans(plans: Sequence[tuple[AxisGroup, SharePlan]]) -> None:
    """Compare the plan of each axis over its ranks. All of them must call, in one order of the axes.

    Args:
        plans: Axes and this rank's plans.

    Raises:
        ConfigError: On every rank of an axis on which two plans differ, naming the first difference.
    """
    for axis, plan in plans:
        _compare([axis], plan.lines(), "plans", f"ranks of {axis.axis} would exchange different matrices")


def _compare(axes: Sequence[AxisGroup], lines: list[str], verb: str, why: str) -> None:
    """Refuse differences on every rank that the axes reach together, also where its own axes agree."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    # some 100 bytes a rank on each axis, once; the host waits
    if len(_merged(axes, {digest: (rank, [])})) == 1:
        return
    told = sorted(_merged(axes, {digest: (rank, lines)}).values())
    (first, ours), (second, theirs) = told[:2]
    pairs = zip_longest(ours, theirs, fillvalue="nothing more")
    mine, other = next((a, b) for a, b in pairs if a != b)
    raise ConfigError(
        "optimizer",
        f"rank {first} {verb} '{mine}', rank {second} '{other}'",
        why,
        "give every rank the same options and the same parameters in the same order",
    )


def _merged(axes: Sequence[AxisGroup], told: _Told) -> _Told:
    """What is told on any rank, and the lowest rank that tells it."""
    for axis in axes:
        if axis.group is None:
            continue
        every, told = gathered_objects(told, "options and plans", axis), {}
        for theirs in every:
            for digest, (rank, lines) in theirs.items():
                told[digest] = min(told.get(digest, (rank, lines)), (rank, lines))
    return told
