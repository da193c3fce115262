"""The distributed Muon of a run from options alone: the plans that its ranks will make. No torch.

Expert-parallel and tensor-parallel ranks plan alike, so a pipeline stage has one plan for each kind of weight (dense,
routed experts) and each replica that updates other weights. A test on every lane compares digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hp_muon_plugin.config.choices import OuterMode, PlatformName
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
from hp_muon_plugin.muon.distributed.replica_plan import SentWeights, replica_owners, sent_weights


@dataclass(frozen=True, slots=True)
class PlannedShare:
    """What one shard group does.

    Attributes:
        is_expert: Whether it holds routed experts.
        replica: Which replica of the shards it is; 0 also where all of them do the same.
        plan: Its plan.
        sent: What replicas send each other of new weights, by place on the shard axis; the same for all of them.
    """

    is_expert: bool
    replica: int
    plan: SharePlan
    sent: SentWeights


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
        return {
            (share.is_expert, share.replica): [
                told.also("broadcast", *share.sent.arriving(place, share.replica)) if share.sent else told
                for place, told in enumerate(arriving(share.plan))
            ]
            for share in self.shares
        }


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
    replicas = shards.options.replicas
    shares = []
    for is_expert, name in ((False, "dp"), (True, "expert_dp")):
        sizes = {bucket.layout.num_shards for bucket in shards.buckets if bucket.is_expert is is_expert}
        if not sizes:
            continue
        size, axis = sizes.pop(), name if replicas == 1 else f"{name}_shard"
        told = list(_params(shards, known, is_expert))
        owners, sent = [owner for _, owner in told], SentWeights(0, {})
        if replicas > 1 and shards.options.outer is OuterMode.replicate:
            params = [param for param, _ in told]
            owners = list(replica_owners(params, options, replicas=replicas, device=device_of(config)))
            sent = sent_weights(params, owners)
        is_divided = shards.options.outer is not OuterMode.replicate or any(owner is not None for owner in owners)
        for replica in range(replicas if is_divided else 1):
            updated = [param for (param, _), owner in zip(told, owners, strict=True) if owner in (None, replica)]
            plan = share_plan(updated, options, axis=axis, size=size, device=device_of(config))
            shares.append(PlannedShare(is_expert, replica, plan, sent))
    inner = {False: topology.tp, True: topology.ep * topology.etp}
    return StageShares(tuple(shares), inner, data_parallel_size(topology, world_size) * topology.tp)


def _params(
    shards: ShardPlan, known: dict[str, ParamSpec], is_expert: bool
) -> Iterator[tuple[ShardedParam, int | None]]:
    """Parameters of one kind, and which replica has their gradients; None if all have."""
    for owned in owned_buckets(shards):
        if owned.bucket.is_expert is not is_expert:
            continue
        layout = owned.bucket.layout
        for index, placement in enumerate(layout.placements):
            if placement.name in known:
                owner = None if owned.owners is None else owned.owners[index]
                yield ShardedParam(known[placement.name], layout.cuts(index)), owner
