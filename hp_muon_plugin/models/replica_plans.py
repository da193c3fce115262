"""Which data-parallel rank will update what under Megatron's DistributedDataParallel, from options alone. No torch.

A test on every lane compares these plans with those of real ranks.
"""

from collections.abc import Sequence

from hp_muon_plugin.config.dp_checks import expert_data_parallel_size
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.topology_checks import data_parallel_size
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.models.muon_shares import device_of
from hp_muon_plugin.muon.distributed.replica_plan import ReplicaPlan, replica_plan


def ddp_replica_plans(config: Train, held: Sequence[ParamSpec], world_size: int) -> list[ReplicaPlan]:
    """Plan the Muon step of ranks that all hold the same weights.

    Args:
        config: Checked options with Megatron's DistributedDataParallel and ``optimizer=hp_muon``.
        held: The parameters that Muon takes, of one pipeline stage and expert-parallel rank.
        world_size: Ranks.

    Returns:
        A plan for dense weights and one for routed experts; kinds without weights, or with one rank, are left out.
    """
    options, topology = config.optimizer, config.topology
    assert isinstance(options, HpMuon)
    sizes = (data_parallel_size(topology, world_size), expert_data_parallel_size(topology, world_size))
    plans = []
    for is_expert, axis, size in ((False, "dp", sizes[0]), (True, "expert_dp", sizes[1])):
        params = [spec for spec in held if spec.is_expert is is_expert]
        if params and size > 1:
            plans.append(replica_plan(params, options, axis=axis, size=size, device=device_of(config)))
    return plans
