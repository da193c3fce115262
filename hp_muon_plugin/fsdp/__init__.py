"""HyperParallel-FSDP: sharded data parallelism on plain tensors, without a copy around any collective."""

from hp_muon_plugin.fsdp.api import default_granularity, hp_fully_shard
from hp_muon_plugin.fsdp.mesh import ShardMesh
from hp_muon_plugin.fsdp.policy import MixedPrecision
from hp_muon_plugin.fsdp.roots import no_sync, set_requires_all_reduce, set_requires_gradient_sync

__all__ = [
    "MixedPrecision",
    "ShardMesh",
    "default_granularity",
    "hp_fully_shard",
    "no_sync",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
]
