"""The distributed Muon of a run from options alone: the plans that its ranks will make. No torch.

Expert-parallel and tensor-parallel ranks plan alike, so a pipeline stage has one plan for each kind of weight (dense,
routed experts) and each replica that updates other weights. A test on every lane compares digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.topology_checks import data_parallel_size
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.models.replica_owners import owned_buckets
from hp_muon_plugin.models.shard_plan import ShardPlan
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.messages import Arriving, arriving
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.distributed.planner import share_plan


@dataclass(frozen=True, slots=True)
class PlannedShare:
    """What one shard group does.

    Attributes:
        is_expert: Whether it holds routed experts.
        replica: Which replica of the shards it is; 0 also where all of them do the same.
        plan: Its plan.
    """

    is_expert: bool
    replica: int
    plan: SharePlan


@dataclass(frozen=True)
class StageShares:
    """The plans of one pipeline stage.

    Attributes:
        shares: By kind of weight and replica.
        inner: Ranks between two neighbours on a shard axis, for dense weights and for experts.
        ranks: Ranks of the stage.
    """

    shares: tuple[PlannedShare, ...]
    inner: dict[bool, int]
    ranks: int

    @property
    def kinds(self) -> list[list[PlannedShare]]:
        """Shares by kind of weight, dense ones first; those without matrices left out."""
        kinds = ([share for share in self.shares if share.is_expert is kind] for kind in (False, True))
        return [kind for kind in kinds if any(share.plan.params for share in kind)]

    def share_of(self, shares: Sequence[PlannedShare], rank: int) -> tuple[PlannedShare, int]:
        """The share of a rank, and its place on the share's axis.

        Args:
            shares: Of one kind.
            rank: Counted from the first rank of the stage.

        Returns:
            Both.
        """
        place, size = rank // self.inner[shares[0].is_expert], shares[0].plan.size
        return shares[place // size % len(shares)], place % size

    @cached_property
    def loads(self) -> list[float]:
        """Newton-Schulz operations of every rank, over all kinds of weights and all replicas."""
        kinds = self.kinds
        found = [0.0] * self.ranks
        for rank in range(self.ranks):
            for shares in kinds:
                share, place = self.share_of(shares, rank)
                found[rank] += share.plan.loads[place]
        return found

    def seconds(self, rank: int) -> tuple[float, float]:
        """Predicted time of a rank, computing and communicating.

        Args:
            rank: Counted from the first rank of the stage.

        Returns:
            Both, at the rates of the plans.
        """
        computing = communicating = 0.0
        for shares in self.kinds:
            share, place = self.share_of(shares, rank)
            told, rates = self.arriving(share)[place], share.plan.rates
            computing += share.plan.loads[place] / rates.flops
            communicating += told.num_bytes / rates.bytes_received + told.num_messages * rates.message_s
        return computing, communicating

    def arriving(self, share: PlannedShare) -> list[Arriving]:
        """What arrives at every place of a share's axis."""
        return self._arriving[share.is_expert, share.replica]

    @cached_property
    def _arriving(self) -> dict[tuple[bool, int], list[Arriving]]:
        return {(share.is_expert, share.replica): arriving(share.plan) for share in self.shares}


def device_of(config: Train) -> str:
    """The device that is planned for: the platform's, and the CPU for ``auto``.

    Args:
        config: Options.

    Returns:
        ``cpu``, ``cuda`` or ``npu``.
    """
    name = config.platform.name
    return "cpu" if name is PlatformName.auto else str(name)


def stage_shares(config: Train, shards: ShardPlan, specs: Sequence[ParamSpec], world_size: int) -> StageShares:
    """Plan the Muon step of a pipeline stage.

    Args:
        config: Checked options with ``dp=hp_fsdp`` and ``optimizer=hp_muon``.
        shards: Layout of the stage.
        specs: The parameters that Muon takes, of the whole model.
        world_size: Ranks.

    Returns:
        The plans.
    """
    options, topology = config.optimizer, config.topology
    assert isinstance(options, HpMuon)
    known = {spec.name: spec for spec in specs}
    is_divided = any(owned.owners is not None for owned in owned_buckets(shards))
    shares = []
    for is_expert, name in ((False, "dp"), (True, "expert_dp")):
        for replica in range(shards.options.replicas if is_divided else 1):
            params = list(_params(shards, known, is_expert, replica))
            sizes = {bucket.layout.num_shards for bucket in shards.buckets if bucket.is_expert is is_expert}
            if sizes:
                axis = name if shards.options.replicas == 1 else f"{name}_shard"
                plan = share_plan(params, options, axis=axis, size=sizes.pop(), device=device_of(config))
                shares.append(PlannedShare(is_expert, replica, plan))
    inner = {False: topology.tp, True: topology.ep * topology.etp}
    return StageShares(tuple(shares), inner, data_parallel_size(topology, world_size) * topology.tp)


def _params(shards: ShardPlan, known: dict[str, ParamSpec], is_expert: bool, replica: int) -> Iterator[ShardedParam]:
    for owned in owned_buckets(shards):
        if owned.bucket.is_expert is not is_expert:
            continue
        layout = owned.bucket.layout
        for index, placement in enumerate(layout.placements):
            if placement.name in known and (owned.owners is None or owned.owners[index] == replica):
                yield ShardedParam(known[placement.name], layout.cuts(index))
