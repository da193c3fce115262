"""The ranks over which a unit is sharded, and those that replicate it."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.platform.collectives import AxisGroup


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
