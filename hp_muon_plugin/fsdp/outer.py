"""Reductions between replicas: units fused into groups, begun as they fill, waited for at the end.

The reduced shards of a group's buckets lie next to each other, in the order in which backward
reaches them, so that one collective over the slow link reads several units without a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.changes import take_grads
from hp_muon_plugin.fsdp.unused import are_unused
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Collective, Expected, Handle, Wire
from hp_muon_plugin.platform.wire import wait_for


@dataclass(slots=True)
class Segment:
    """A stretch of a group whose parameters one replica updates.

    Attributes:
        owner: Place on the replicate axis.
        start: First element in the group.
        stop: One past the last.
    """

    owner: int
    start: int
    stop: int


@dataclass(slots=True)
class Group:
    """Buckets that are reduced between replicas together.

    Attributes:
        buckets: In the order in which backward reaches them.
        axis: The replicate axis.
        mode: What replicas do with the sums.
        grad: Reduced gradients of all buckets.
        scratch: The same for one micro-batch, where earlier ones are already summed over replicas.
        compute: With an owner per parameter: the buckets' compute shards.
        segments: With an owner per parameter: who updates what, in order.
    """

    buckets: list[Bucket]
    axis: AxisGroup
    mode: OuterMode
    grad: torch.Tensor
    scratch: torch.Tensor | None = None
    compute: torch.Tensor | None = None
    segments: list[Segment] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    weight_handles: list[Handle] = field(default_factory=list)
    expected: list[Expected | None] = field(default_factory=list)
    expected_weights: list[Expected | None] = field(default_factory=list)
    num_ready: int = 0
    num_settled: int = 0
    is_added: bool = False
    is_partial: bool = False
    is_stale: bool = False
    _owners: dict[int, list[int]] = field(default_factory=dict)

    def place(self, bucket: Bucket) -> int:
        """First element of a bucket in the group."""
        return sum(other.layout.shard_numel for other in self.buckets[: self.buckets.index(bucket)])

    def out(self, bucket: Bucket) -> torch.Tensor:
        """Where a bucket's reduce-scatter writes.

        Args:
            bucket: One of the group.

        Returns:
            ``(shard_numel,)``: a part of ``grad``, or of ``scratch`` if gradients of earlier micro-batches
            are there.

        Raises:
            RuntimeError: If earlier micro-batches are summed over replicas and this one is not to be.
        """
        if self.num_ready == 0:
            self.is_added = self.is_partial or any(other.has_grad for other in self.buckets)
        self.num_ready += 1
        return self._part(self.scratch if self.is_added else self.grad, bucket)

    def _part(self, flat: torch.Tensor | None, bucket: Bucket) -> torch.Tensor:
        if flat is None:
            flat = self.scratch = torch.empty_like(self.grad)
        start = self.place(bucket)
        return flat[start : start + bucket.layout.shard_numel]

    def settle(self, bucket: Bucket) -> None:
        """Account for a finished reduce-scatter.

        Args:
            bucket: Whose.
        """
        if self.is_added and self.is_partial:
            self._part(self.grad, bucket).add_(self._part(self.scratch, bucket))
        self.num_settled += 1

    @property
    def is_full(self) -> bool:
        """Whether all buckets are reduced over the shard axis."""
        return self.num_settled == len(self.buckets)

    def owners(self, bucket: Bucket) -> list[int] | None:
        """Which replica updates each parameter.

        Args:
            bucket: One of the group.

        Returns:
            Places on the replicate axis in buffer order, or None if every replica updates all.
        """
        return self._owners.get(id(bucket))

    def take_owners(self, owners: Sequence[int]) -> None:
        """Learn which replica updates each parameter.

        Args:
            owners: Places on the replicate axis, of all buckets' parameters in buffer order.
        """
        rest = iter(owners)
        for bucket in self.buckets:
            self._owners[id(bucket)] = [next(rest) for _ in bucket.parameters]
        self.segments = list(self._segments())

    def _segments(self) -> Iterator[Segment]:
        ends: list[tuple[int, int]] = []  # (owner, end in the group) of every parameter's part of this shard
        place = 0
        for bucket in self.buckets:
            for parameter, owner in zip(bucket.parameters, self._owners[id(bucket)], strict=True):
                shard = parameter.sharded
                if shard.numel():
                    offset = int(shard.storage_offset() - bucket.master.storage_offset())
                    ends.append((owner, place + offset + shard.numel()))
            place += bucket.layout.shard_numel
        start = 0
        for owner, run in groupby(ends, key=lambda end: end[0]):
            stop = list(run)[-1][1]
            yield Segment(owner, start, stop)
            start = stop

    @property
    def _summed(self) -> torch.Tensor:
        """What replicas sum: this micro-batch alone if earlier ones are summed already."""
        flat = self.scratch if self.is_added and not self.is_partial else self.grad
        assert flat is not None
        return flat

    def expect(self, wire: Wire) -> None:
        """Announce the reduction of a backward pass that begins.

        Args:
            wire: Collectives.
        """
        if self.mode is OuterMode.shard:
            self.expected = [
                wire.expect(Collective.REDUCE, self.grad[part.start : part.stop], self.axis, owner_index=part.owner)
                for part in self.segments
            ]

    def begin(self, wire: Wire) -> None:
        """Begin the reduction, all buckets being ready.

        Args:
            wire: Collectives.
        """
        flat = self._summed
        if self.mode is OuterMode.shard:
            expected, self.expected = self.expected, []
            # replicate axis, each segment to its owner; the end of backward waits
            self.handles = [
                wire.reduce(flat[part.start : part.stop], part.owner, self.axis, expected=early)
                for part, early in zip(self.segments, expected, strict=True)
            ]
        else:
            # replicate axis, the whole group; the end of backward waits
            self.handles = [wire.all_reduce(flat, self.axis)]

    def finish(self) -> list[torch.nn.Parameter]:
        """Wait for the reduction, divide, add what earlier micro-batches left, and publish the gradients.

        Returns:
            Shards that have them.
        """
        wait_for(self.handles, "sum of gradients over {}", self.axis.axis)
        flat, divisor = self._summed, self.buckets[0].divisor
        chosen = self._with_gradients(flat)
        if divisor != 1.0 and flat.dtype is not torch.float16:
            flat.div_(divisor)
        if flat is not self.grad:
            for bucket in self.buckets:
                take_grads(bucket, self._part(flat, bucket))
            self.grad.add_(flat)
        self.num_ready = self.num_settled = 0
        self.is_added = self.is_partial = False
        for bucket, indices in zip(self.buckets, chosen, strict=True):
            bucket.publish(indices)
        return [
            bucket.parameters[index].sharded
            for bucket, indices in zip(self.buckets, chosen, strict=True)
            for index in indices
        ]

    def _with_gradients(self, flat: torch.Tensor) -> list[list[int]]:
        """Parameters of each bucket whose shards are to have a gradient on this rank: not those that no rank used.

        Of what it did not use, a rank that holds nothing learns nothing: its empty shard is left alone as well.
        """
        chosen = [bucket.receiving(self.owners(bucket)) for bucket in self.buckets]
        doubtful = [
            (bucket, index)
            for bucket, indices in zip(self.buckets, chosen, strict=True)
            for index in bucket.unused
            if index in indices and bucket.parameters[index].sharded.grad is None
        ]
        if doubtful:
            answers = are_unused([bucket.shard_view(self._part(flat, bucket), index) for bucket, index in doubtful])
            for (bucket, index), is_unused in zip(doubtful, answers, strict=True):
                if is_unused:
                    chosen[self.buckets.index(bucket)].remove(index)
        return chosen

    def keep_partial(self) -> None:
        """Keep sums over the shard axis alone, for a later micro-batch to sum over replicas.

        Raises:
            RuntimeError: If earlier micro-batches are summed over replicas already.
        """
        if self.is_added and not self.is_partial:
            raise RuntimeError(
                "set_requires_all_reduce(False): gradients of an earlier micro-batch are summed over replicas already\n"
                "  fix: leave it False for all micro-batches but the last, or call zero_grad() before the first"
            )
        self.num_ready = self.num_settled = 0
        self.is_added, self.is_partial = False, True

    def expect_weights(self, wire: Wire) -> None:
        """Announce :meth:`send_weights`: weights of all groups are announced before any is sent.

        Args:
            wire: Collectives.
        """
        if self.is_stale and self.compute is not None:
            self.expected_weights = [
                wire.expect(
                    Collective.BROADCAST, self.compute[part.start : part.stop], self.axis, owner_index=part.owner
                )
                for part in self.segments
            ]

    def send_weights(self, wire: Wire) -> None:
        """Begin to send updated weights from their owners, if they may have been updated since the last time.

        Args:
            wire: Collectives.
        """
        if not self.is_stale or self.compute is None:
            return
        self.is_stale = False
        # replicate axis, each segment from its owner; the first gather of a bucket waits
        self.weight_handles = [
            wire.broadcast(self.compute[part.start : part.stop], part.owner, self.axis, expected=early)
            for part, early in zip(self.segments, self.expected_weights, strict=True)
        ]
        self.expected_weights = []

    def send_shards(self, wire: Wire) -> None:
        """Send shards from their owners where the compute type is not theirs. Waits.

        Args:
            wire: Collectives.
        """
        for bucket in self.buckets:
            owners = self.owners(bucket)
            if owners is None or bucket.compute is bucket.master:
                continue
            for parameter, owner in zip(bucket.parameters, owners, strict=True):
                # replicate axis, this shard's part of one parameter
                handle = wire.broadcast(parameter.sharded.detach().reshape(-1), owner, self.axis)
                wait_for([handle], "weights from their owners on {}", self.axis.axis)

    def wait_weights(self) -> None:
        """Wait for weights that are under way, and keep them where the shards are of another type."""
        if not self.weight_handles:
            return
        wait_for(self.weight_handles, "weights from their owners on {}", self.axis.axis)
        for bucket in self.buckets:
            bucket.adopt(self.owners(bucket) or [])
