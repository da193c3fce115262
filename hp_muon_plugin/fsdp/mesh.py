"""The ranks over which a unit is sharded, and those that replicate it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_muon_plugin.config.topology_checks import divisors
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.failures import naming

_NEAR: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True)
class ShardMesh:
    """Axes of one unit.

    Attributes:
        shard: Ranks that hold one shard each. Its link should be fast.
        replicate: Ranks that hold the same shard, one in each shard group. Its link may be slow.
    """

    shard: AxisGroup
    replicate: AxisGroup

    @property
    def size(self) -> int:
        """Ranks that share a gradient."""
        return self.shard.size * self.replicate.size

    def near(self, size: int) -> AxisGroup:
        """Neighbours on the shard axis. All ranks of it must call with the same size.

        Args:
            size: How many; divides the axis.

        Returns:
            The ``size`` consecutive ranks that this rank is among.

        Raises:
            ConfigError: If it does not divide the axis.
        """
        if not 1 < size <= self.shard.size or self.shard.size % size:
            raise ConfigError(
                "reshard_after_forward",
                size,
                f"does not divide the {self.shard.size} ranks of {self.shard.axis}",
                "use True, False, or a divisor of the shard ranks above 1",
            )
        first = self.shard.index // size * size
        group = self.shard.group
        if group is None or size == self.shard.size:
            return self.shard
        key = (group, size)
        if key not in _NEAR:
            ranks = [dist.get_global_rank(group, first + place) for place in range(size)]
            _NEAR[key] = _new_group(ranks, f"{self.shard.axis} by {size}")
        return AxisGroup(f"{self.shard.axis} by {size}", size, self.shard.index - first, _NEAR[key])

    @classmethod
    def divided(cls, axis: AxisGroup, replicas: int = 1) -> "ShardMesh":
        """Divide a group into replicas: consecutive ranks shard, ranks at the same place replicate.

        Args:
            axis: Ranks that share gradients; all of them must call, with the same number.
            replicas: How many; divides the ranks.

        Returns:
            The axes that this rank is on.

        Raises:
            ConfigError: If it does not divide the ranks.
        """
        if replicas < 1 or axis.size % replicas:
            why = f"does not divide the {axis.size} ranks of {axis.axis}"
            raise ConfigError("replicas", replicas, why, f"choose among {divisors(axis.size)}")
        if replicas == 1 or axis.group is None:
            return cls(axis, AxisGroup.single(f"{axis.axis}_replicate"))
        if (axis.group, replicas) not in _DIVIDED:
            size = axis.size // replicas
            first, place = axis.index // size * size, axis.index % size
            members = range(first, first + size), range(place, axis.size, size)
            shard, replicate = (_new_axis(axis, kind, list(ranks)) for kind, ranks in zip(_KINDS, members, strict=True))
            _DIVIDED[axis.group, replicas] = cls(shard, replicate)
        return _DIVIDED[axis.group, replicas]

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> "ShardMesh":
        """Read a mesh as ``fully_shard`` does: one axis shards, of two the first replicates.

        Args:
            mesh: One or two axes.

        Returns:
            The axes that this rank is on.

        Raises:
            ConfigError: If the mesh has more axes.
        """
        names = mesh.mesh_dim_names or ("dp_shard",) if mesh.ndim == 1 else mesh.mesh_dim_names or ("outer", "inner")
        if mesh.ndim == 1:
            return cls(AxisGroup.from_group(names[0], mesh.get_group(0)), AxisGroup.single("dp_replicate"))
        if mesh.ndim == 2:
            replicate, shard = (AxisGroup.from_group(names[dim], mesh.get_group(dim)) for dim in (0, 1))
            return cls(shard, replicate)
        raise ConfigError(
            "mesh", names, f"has {mesh.ndim} axes", "give one axis (shard) or two (replicate, shard), by mesh[...]"
        )


_KINDS = ("shard", "replicate")
_DIVIDED: dict[tuple[dist.ProcessGroup, int], ShardMesh] = {}


def _new_axis(axis: AxisGroup, kind: str, places: list[int]) -> AxisGroup:
    """The ranks at some places of an axis; they alone must call."""
    name = f"{axis.axis}_{kind}"
    if len(places) == 1:
        return AxisGroup.single(name)
    assert axis.group is not None
    ranks = [dist.get_global_rank(axis.group, place) for place in places]
    return AxisGroup.from_group(name, _new_group(ranks, name))


def _new_group(ranks: list[int], name: str) -> dist.ProcessGroup:
    with naming("making of the group {}", name):
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
