"""Building the optimizer of a sharded model in plain PyTorch."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.distributed.ahead import Reductions
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.planner import BATCH_BYTES
from hp_muon_plugin.muon.distributed.shards import GradientListener, ShardOf, axes_of, local_part
from hp_muon_plugin.muon.distributed.share import Share, divided_share
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.muon.routing import Algorithm
from hp_muon_plugin.platform.collectives import AxisGroup, gathered_objects
from hp_muon_plugin.platform.protocol import Wire


def sharded_optimizer(
    shards: Sequence[ShardOf],
    groups: Sequence[dict[str, Any]],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
    config: HpMuon,
    *,
    wire: Wire | None = None,
    rates: Rates | None = None,
    max_batch_bytes: int = BATCH_BYTES,
    listen: Callable[[GradientListener], None] | None = None,
) -> ShardedMuonOptimizer:
    """Muon over the shards of a model, AdamW over those that Muon does not take.

    Args:
        shards: All parameters of the model, in one order on all ranks.
        groups: Groups of its shards.
        specs: Specs of the whole parameters.
        config: Options.
        wire: Collectives; None takes torch.distributed.
        rates: By which ``strategy=auto`` chooses; None takes the device's default.
        max_batch_bytes: See :func:`~hp_muon_plugin.muon.distributed.planner.share_plan`.
        listen: Lets the model tell what backward has reduced; None if it cannot.

    Returns:
        The optimizer.
    """
    muon = {param for group in groups if group["algorithm"] == Algorithm.muon for param in group["params"]}
    by_axis: dict[AxisGroup, list[ShardOf]] = {}
    for shard in shards:
        if shard.param in muon and shard.is_owned:
            by_axis.setdefault(shard.axis, []).append(shard)
    device = next((local_part(shard.param).device for shard in shards), torch.device("cpu"))
    divided = _divided_axes(shards)
    shares = [_share(held, specs, config, device.type, is_divided=axis in divided) for axis, held in by_axis.items()]
    axes, summed = norm_axes(shards, divided)
    return ShardedMuonOptimizer(
        groups,
        specs,
        config,
        shares=shares,
        device=device,
        axes=axes,
        summed=summed,
        agree=axes_of(shards),
        not_owned=frozenset(shard.param for shard in shards if not shard.is_owned),
        wire=wire,
        rates=rates,
        max_batch_bytes=max_batch_bytes,
        reductions=None if listen is None else Reductions(listen, lambda shard: shard.grad),
    )


def _share(
    held: Sequence[ShardOf],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
    config: HpMuon,
    device: str,
    *,
    is_divided: bool,
) -> Share:
    """The parameters of one axis that this replica updates, and what replicas send each other."""
    axis, replicas = held[0].axis, held[0].replicas
    if is_divided or any(shard.replicas != replicas for shard in held):
        replicas = AxisGroup.single("undivided")
    told = [
        (
            ShardedParam(specs[shard.param], shard.cuts),
            shard.param if local_part(shard.param).numel() else None,
            shard.param,
        )
        for shard in held
    ]
    return divided_share(axis, replicas, told, config, device)


def replicated_optimizer(
    axis: AxisGroup,
    groups: Sequence[dict[str, Any]],
    specs: Mapping[torch.nn.Parameter, ParamSpec],
    config: HpMuon,
) -> ShardedMuonOptimizer:
    """Muon over parameters that every rank holds whole, as under DistributedDataParallel.

    Args:
        axis: The ranks.
        groups: Groups of parameters, the same on all of them.
        specs: Specs of all parameters.
        config: Options.

    Returns:
        The optimizer.
    """
    held = [param for group in groups if group["algorithm"] == Algorithm.muon for param in group["params"]]
    share = Share(
        axis,
        tuple(ShardedParam(specs[param], Cuts.of((0, specs[param].numel))) for param in held),
        tuple(held),
        is_replicated=True,
    )
    device = held[0].device
    return ShardedMuonOptimizer(groups, specs, config, shares=[share], device=device, agree=[axis])


def norm_axes(
    shards: Sequence[ShardOf], divided: Set[AxisGroup] | None = None
) -> tuple[dict[str, AxisGroup], dict[torch.nn.Parameter, str]]:
    """Axes over whose ranks the parts of gradients lie, by name, and the name for each shard.

    Where each replica updates other parameters, replicas hold other gradients too, and the ranks of all replicas
    count together.

    Args:
        shards: All parameters of the model, in one order on all ranks.
        divided: Axes whose replicas update different parameters. None: ask the ranks, all of which must call it.

    Returns:
        The axes, and the axis of each shard.
    """
    if divided is None:
        divided = _divided_axes(shards)
    axes: dict[str, AxisGroup] = {}
    summed: dict[torch.nn.Parameter, str] = {}
    names: dict[tuple[AxisGroup, AxisGroup | None], str] = {}
    for shard in shards:
        replicas = shard.replicas if shard.axis in divided else None
        key = (shard.axis, replicas)
        if key not in names:
            name = shard.axis.axis if shard.axis.axis not in axes else f"{shard.axis.axis} {len(axes)}"
            names[key] = name
            axes[name] = shard.axis if replicas is None else _joint(shard.axis, replicas)
        summed[shard.param] = names[key]
    return axes, summed


def _divided_axes(shards: Sequence[ShardOf]) -> set[AxisGroup]:
    """Axes whose replicas update different parameters; one that happens to update all learns it from the others."""
    found: set[AxisGroup] = set()
    by_pair: dict[tuple[AxisGroup, AxisGroup], bool] = {}
    for shard in shards:
        if shard.replicas.size > 1:
            pair = (shard.axis, shard.replicas)
            by_pair[pair] = by_pair.get(pair, False) or not shard.is_owned
    for (axis, replicas), is_any in by_pair.items():
        if any(gathered_objects(is_any, "who updates what", replicas)):  # one flag a rank, once; the host waits
            found.add(axis)
    return found


def _joint(axis: AxisGroup, replicas: AxisGroup) -> AxisGroup:
    """The ranks of an axis in all replicas."""
    size = axis.size * replicas.size
    if size == dist.get_world_size():
        return AxisGroup.from_group(f"{axis.axis} in all replicas", dist.group.WORLD)  # type: ignore[arg-type]
    raise ConfigError(
        "outer",
        "shard or broadcast",
        f"{size} of {dist.get_world_size()} ranks share the model, and gradient norms would miss the others",
        "shard over all ranks of the job, or take outer=replicate",
    )
