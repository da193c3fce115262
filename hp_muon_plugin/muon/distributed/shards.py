"""Which parts of a model's parameters ranks hold, whoever divided them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.muon.distributed.items import dim0_cuts
from hp_muon_plugin.platform.collectives import AxisGroup

SHARDS = "hp_muon_shards"
"""Attribute of a module that calls to list its shards: what our ``hp_fully_shard`` sets on a root."""
LISTEN = "hp_muon_listen"
"""Attribute of such a module that lets somebody know what backward has reduced."""


class GradientListener(Protocol):
    """Is told by a sharded model what backward has reduced, in one order on all ranks."""

    def begun(self) -> None:
        """A backward pass begins: gradients that were reduced before are not the last word."""

    def reduced(self, shards: Sequence[torch.nn.Parameter]) -> None:
        """Gradients are reduced over all ranks.

        Args:
            shards: Whose; some of them may be empty on this rank.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ShardOf:
    """One parameter of a sharded model.

    Attributes:
        param: This rank's part, as optimizers see it; may be empty.
        shape: Of the whole parameter.
        cuts: ``(ranks + 1,)`` elements; rank i of the axis holds those from ``cuts[i]`` to ``cuts[i + 1]``.
        axis: The ranks that share it.
        replicas: The ranks that hold the same part.
        is_owned: Whether this replica updates it.
    """

    param: torch.nn.Parameter
    shape: tuple[int, ...]
    cuts: Cuts
    axis: AxisGroup
    replicas: AxisGroup
    is_owned: bool


def shards_of(module: torch.nn.Module) -> list[ShardOf]:
    """Parameters of a model that ``hp_fully_shard`` or torch's ``fully_shard`` divided.

    Args:
        module: The root.

    Returns:
        All of its parameters in the order of ``module.parameters()``, or nothing if it is not sharded.

    Raises:
        ConfigError: If some parameters are divided in a way that Muon cannot follow.
    """
    told: Callable[[], Sequence[ShardOf]] | None = getattr(module, SHARDS, None)
    if told is not None:
        by_param = {shard.param: shard for shard in told()}
        return [by_param[param] for param in module.parameters() if param in by_param]
    named = list(module.named_parameters())
    if not any(isinstance(param, DTensor) for _, param in named):
        return []
    axes: dict[object, AxisGroup] = {}
    return [_of_dtensor(name, param, axes) for name, param in named]


def _of_dtensor(name: str, param: torch.nn.Parameter, axes: dict[object, AxisGroup]) -> ShardOf:
    if not isinstance(param, DTensor):
        none = AxisGroup.single("whole")
        return ShardOf(param, tuple(param.shape), Cuts.of((0, param.numel())), none, none, is_owned=True)
    mesh, placements = param.device_mesh, param.placements
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    sharding = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    is_dim0 = all(type(placements[dim]) is Shard and placements[dim].is_shard(0) for dim in sharding)
    if len(sharding) > 1 or not is_dim0 or mesh.ndim > 2:
        raise ConfigError(
            "params",
            name,
            f"is a DTensor placed as {placements} on a mesh of {mesh.ndim} axes",
            "shard dim 0 over one axis (fully_shard on a mesh of one or two axes); for tensor parallelism use Megatron",
        )

    def axis_of(dims: list[int]) -> AxisGroup:
        if not dims or mesh.size(dims[0]) == 1:
            return AxisGroup.single(names[dims[0]] if dims else "whole")
        key = (mesh, dims[0])
        if key not in axes:
            axes[key] = AxisGroup.from_group(names[dims[0]], mesh.get_group(dims[0]))
        return axes[key]

    axis = axis_of(sharding)
    cuts = dim0_cuts(param.shape, axis.size) if axis.size > 1 else Cuts.of((0, param.numel()))
    replicas = axis_of([dim for dim in range(mesh.ndim) if dim not in sharding])
    return ShardOf(param, tuple(param.shape), cuts, axis, replicas, is_owned=True)


def axes_of(shards: Sequence[ShardOf]) -> list[AxisGroup]:
    """Axes that together reach all ranks of a model.

    Args:
        shards: Its shards.

    Returns:
        Each axis once, those of shards before those of replicas.
    """
    return list(dict.fromkeys([*(shard.axis for shard in shards), *(shard.replicas for shard in shards)]))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, plain.

    Args:
        tensor: A DTensor, or any other.

    Returns:
        A view of its memory.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
