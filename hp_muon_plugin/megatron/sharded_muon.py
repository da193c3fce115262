"""Muon over the shards of HP-FSDP: whole matrices without communication, cut ones gathered per bucket.

A matrix that lies whole in one shard is orthogonalised by the rank that holds it, and by no other. For
the rest the momenta of a bucket are gathered over the shard axis, every rank that holds rows of a
matrix orthogonalises it, and each takes its own rows: no matrix is an approximation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.bucket import Placement
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup, all_gather

_Steps = Mapping[torch.nn.Parameter, ParamStep | None]


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """This rank's rows of a parameter that several ranks share.

    Attributes:
        main: The shard that the optimizer updates.
        spec: Spec of the whole parameter.
        placement: Where the parameter lies in its bucket.
        start: First element that this rank holds.
        offset: Where that lies in the bucket's shard.
    """

    main: torch.nn.Parameter
    spec: ParamSpec
    placement: Placement
    start: int
    offset: int


@dataclass(frozen=True, slots=True)
class CutBucket:
    """A bucket with matrices that several ranks share and this replica updates.

    Attributes:
        axis: The shard axis; all of its ranks gather.
        shard_numel: Elements of each rank's range.
        matrices: Those of which this rank holds rows; may be none.
    """

    axis: AxisGroup
    shard_numel: int
    matrices: tuple[CutMatrix, ...]


class ShardedMuonOptimizer(HpMuonOptimizer):
    """:class:`HpMuonOptimizer` over shards.

    Args:
        groups: Groups of shards, none of them empty.
        specs: Specs of the whole parameters.
        config: Options.
        axes: Mesh axes by name that the specs' splits refer to.
        buckets: Where cut matrices lie; the same buckets in the same order on all ranks of a shard axis.
        device: Where shards lie.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        specs: Mapping[torch.nn.Parameter, ParamSpec],
        config: HpMuon,
        *,
        axes: Mapping[str, AxisGroup],
        buckets: Sequence[CutBucket],
        device: torch.device,
    ) -> None:
        super().__init__(groups, specs, config, axes=axes)
        if self._workspace.device.type != device.type:
            self._workspace = Workspace(device)  # this rank has no shard, and gathers all the same
        self._buckets: list[tuple[CutBucket, Executor]] = [
            (bucket, self._make_executor([matrix.spec for matrix in bucket.matrices])) for bucket in buckets
        ]

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since construction."""
        return super().num_orthogonalized + sum(executor.num_orthogonalized for _, executor in self._buckets)

    def _planned(self) -> list[torch.nn.Parameter]:
        return [p for p in self._muon_params() if p.numel() == self.specs[p].local_numel]

    def _orthogonalize(self, steps: _Steps) -> None:
        super()._orthogonalize(steps)
        for bucket, executor in self._buckets:
            self._run_cut(bucket, executor, steps)

    def _run_cut(self, bucket: CutBucket, executor: Executor, steps: _Steps) -> None:
        momenta = self._gather(bucket, steps)
        updates = self._workspace.take("cut_update", (sum(m.placement.numel for m in bucket.matrices),)).zero_()
        wholes, place = list[ParamStep | None](), 0
        for matrix in bucket.matrices:
            step, at = steps[matrix.main], matrix.placement
            momentum = momenta[at.offset : at.stop].view(at.shape)
            update = updates[place : place + at.numel].view(at.shape)
            # the look-ahead is in the momentum already, so that it and the gradient are one
            wholes.append(step and ParamStep(update, momentum, momentum, 0.0, step.lr, step.beta))
            place += at.numel
        executor.run(wholes)
        place = 0
        for matrix in bucket.matrices:
            step, first = steps[matrix.main], place + matrix.start
            if step is not None:
                own = updates[first : first + step.weight.numel()].view(step.weight.shape)
                step.weight.mul_(step.decay).add_(own)
            place += matrix.placement.numel

    def _gather(self, bucket: CutBucket, steps: _Steps) -> torch.Tensor:
        """The look-ahead momenta of the whole bucket: ``(num_shards * shard_numel,)`` float32."""
        own = self._workspace.take("cut_send", (bucket.shard_numel,))
        whole = self._workspace.take("cut_gathered", (bucket.axis.size * bucket.shard_numel,))
        for matrix in bucket.matrices:
            step = steps[matrix.main]
            if step is None:
                continue
            target = own[matrix.offset : matrix.offset + step.weight.numel()].view(step.weight.shape)
            target.copy_(step.momentum)
            if self.config.nesterov:
                target.mul_(step.beta).add_(step.grad, alpha=1 - step.beta)
        all_gather(whole, own, bucket.axis)  # shard axis: 4 * shard_numel bytes from each rank; the host waits
        return whole
