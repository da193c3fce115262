"""The process groups that the plugin needs of Megatron's parallel state."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from hp_muon_plugin.platform.collectives import AxisGroup


@dataclass(frozen=True, slots=True)
class MegatronGroups:
    """Megatron's groups by what we use them for.

    Attributes:
        tp: Tensor-parallel ranks of dense weights.
        etp: Tensor-parallel ranks of expert weights.
        ep: Expert-parallel ranks.
        dp: Ranks that hold the same dense weights and see different data (data x context parallel).
        expert_dp: The same for expert weights.
        dense_stats: Ranks that together hold every dense weight once (tensor x pipeline parallel).
        expert_stats: Ranks that together hold every expert weight once
            (expert-tensor x expert x pipeline parallel).
        dense_shards: Data-parallel ranks that hold different parts of dense weights, with dp=hp_fsdp.
        expert_shards: The same for expert weights.
    """

    tp: AxisGroup
    etp: AxisGroup
    ep: AxisGroup
    dp: AxisGroup
    expert_dp: AxisGroup
    dense_stats: AxisGroup
    expert_stats: AxisGroup
    dense_shards: tuple[AxisGroup, ...] = ()
    expert_shards: tuple[AxisGroup, ...] = ()

    @property
    def stats(self) -> tuple[tuple[bool, tuple[AxisGroup, ...]], ...]:
        """For dense and for expert weights (False and True): over which axes their parts add up."""
        return (False, (self.dense_stats, *self.dense_shards)), (True, (self.expert_stats, *self.expert_shards))

    @property
    def axes(self) -> dict[str, AxisGroup]:
        """The axes that parameters are split over, by name."""
        return {"tp": self.tp, "etp": self.etp}


def megatron_groups(pg_collection: Any = None) -> MegatronGroups:
    """Read the groups.

    Args:
        pg_collection: megatron-core's ``ProcessGroupCollection`` (0.14 and later), or None for the
            global parallel state.

    Returns:
        The groups.
    """

    def pick(name: str, otherwise: Any) -> dist.ProcessGroup:
        found = getattr(pg_collection, name, None) if pg_collection is not None else None
        group: dist.ProcessGroup = found if found is not None else otherwise()
        return group

    state = parallel_state
    return MegatronGroups(
        tp=AxisGroup.from_group("tp", pick("tp", state.get_tensor_model_parallel_group)),
        etp=AxisGroup.from_group("etp", pick("expt_tp", state.get_expert_tensor_parallel_group)),
        ep=AxisGroup.from_group("ep", pick("ep", state.get_expert_model_parallel_group)),
        dp=AxisGroup.from_group("dp", pick("dp_cp", _data_parallel_group)),
        expert_dp=AxisGroup.from_group("expert_dp", pick("expt_dp", state.get_expert_data_parallel_group)),
        dense_stats=AxisGroup.from_group("mp", pick("mp", state.get_model_parallel_group)),
        expert_stats=AxisGroup.from_group(
            "tp_ep_pp", pick("tp_ep_pp", state.get_expert_tensor_model_pipeline_parallel_group)
        ),
    )


def _data_parallel_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group
