"""What a rank updates of the parameters on one shard axis, and what replicas of the axis send each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.replica_plan import replica_owners
from hp_muon_plugin.platform.collectives import AxisGroup

Held = tuple[ShardedParam, torch.nn.Parameter | None, torch.nn.Parameter]
"""A parameter of an axis, what the optimizer updates of it on this rank, or None if that is empty, and this rank's
stretch as the model has it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Muon's parameters on one shard axis, of which this replica updates all.

    Attributes:
        axis: The axis.
        params: The parameters, in one order on all of its ranks.
        mains: What the optimizer updates of each: this rank's stretch, or None if that is empty.
        is_replicated: Whether all ranks of the axis hold all of the parameters.
        replicas: Ranks that hold the same stretches and update other parameters, or None.
        sent: What those send each other after an update: stretches, and the place of who updates them.
        shards: This rank's stretch of each parameter as the model has it, also if it is empty.
    """

    axis: AxisGroup
    params: tuple[ShardedParam, ...]
    mains: tuple[torch.nn.Parameter | None, ...]
    is_replicated: bool = False
    replicas: AxisGroup | None = None
    sent: tuple[tuple[torch.nn.Parameter, int], ...] = ()
    shards: tuple[torch.nn.Parameter, ...] = ()


def divided_share(axis: AxisGroup, replicas: AxisGroup, held: Sequence[Held], config: HpMuon, device: str) -> Share:
    """The share of a replica where all replicas have reduced gradients and momenta of all parameters.

    Args:
        axis: The shard axis.
        replicas: The ranks that hold the same stretches.
        held: The axis' parameters, in one order on all ranks of all replicas.
        config: Options; ``divide_replicas`` decides.
        device: ``cpu``, ``cuda`` or ``npu``.

    Returns:
        What this replica updates; all of it where nothing is worth sending.
    """
    owners = replica_owners([param for param, _, _ in held], config, replicas=replicas.size, device=device)
    told = list(zip(held, owners, strict=True))
    updated = [each for each, owner in told if owner is None or owner == replicas.index]
    sent = tuple((main, owner) for (_, main, _), owner in told if main is not None and owner is not None)
    is_divided = any(owner is not None for owner in owners)
    return Share(
        axis,
        tuple(param for param, _, _ in updated),
        tuple(main for _, main, _ in updated),
        replicas=replicas if is_divided else None,
        sent=sent,
        shards=tuple(shard for _, _, shard in updated),
    )
