"""When units are gathered, resharded and reduced: one schedule for a root and the units inside it.

The order in which units run is observed and, in the next step, followed: the next ``prefetch`` units
are gathered while one computes, forward and backward. Reductions are begun in one order on every
rank, the reverse of forward, whatever the order in which gradients happen to be finished.
"""

import weakref
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.fsdp.agreement import check_agreement, describe
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.buffers import Slot, slots
from hp_muon_plugin.fsdp.outer import Group, make_groups
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.policy import ScheduleOptions
from hp_muon_plugin.fsdp.unit import State, Unit
from hp_muon_plugin.platform.wire import Wire, wait_for

_NUM_GRAD_SLOTS = 2  # one being written, one being reduced


class Schedule:
    """State of one model.

    Attributes:
        units: The root first, then in the order of ``module.modules()``.
        groups: Reductions between replicas.
        in_backward: Whether a backward pass is under way.
        syncs: Whether backward reduces gradients; False accumulates them whole.
        all_reduces: Whether backward sums over replicas too; False accumulates sums over the shard axis.
    """

    def __init__(self, units: Sequence[Unit], options: ScheduleOptions, mode: OuterMode, wire: Wire) -> None:
        self.units, self._options, self._wire = list(units), options, wire
        self.root = self.units[0]
        self.in_backward = False
        self.syncs = self.all_reduces = True
        self._order = list(self.units)  # as observed in the last forward
        self._seen: list[Unit] = []
        self._queue: list[Unit] = []
        self._settling: Unit | None = None
        self._own_grad_slots: dict[int, Slot] = {}
        self._check_agreement(mode)
        reach = [bucket for unit in reversed(self.units) for bucket in unit.trainable]
        self.groups = make_groups(reach, mode, options.outer_bucket_bytes)
        self._group = {id(bucket): group for group in self.groups for bucket in group.buckets}
        self._assign(self._order)
        self._watch_grads()
        self._is_watched = False
        if any(group.segments for group in self.groups):
            _watch_optimizers(self)

    def _check_agreement(self, mode: OuterMode) -> None:
        meshes = dict.fromkeys(bucket.mesh for unit in self.units for bucket in unit.buckets)
        axes = dict.fromkeys(axis for mesh in meshes for axis in (mesh.shard, mesh.replicate))
        check_agreement(describe(self.units, self._options, mode), list(axes))

    def _assign(self, order: Sequence[Unit]) -> None:
        """Give every unit its slots, for units that run in this order."""
        device = self.device
        may_share = [unit.is_leaf and unit.reshards and unit is not self.root for unit in order]
        weights = slots([unit.weight_bytes for unit in order], may_share, self._options.prefetch + 1, device)
        leaves = [unit.is_leaf and unit is not self.root for unit in order]
        grads = slots([unit.grad_bytes for unit in order], leaves, _NUM_GRAD_SLOTS, device)
        self._grad_slots = {id(unit): slot for unit, slot in zip(order, grads, strict=True)}
        for unit, slot in zip(order, weights, strict=True):
            unit.bind(slot)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(bucket.master.device for unit in self.units for bucket in unit.buckets)

    def _watch_grads(self) -> None:
        for unit in self.units:
            for bucket in unit.trainable:
                for parameter in bucket.parameters:
                    parameter.full.register_post_accumulate_grad_hook(partial(self._arrived, unit, bucket, parameter))

    def _arrived(self, unit: Unit, bucket: Bucket, parameter: Parameter, _: torch.Tensor) -> None:
        if unit.is_reduced:
            raise RuntimeError(
                f"{unit.name}.{parameter.name}: a gradient came after the unit's were reduced\n"
                "  fix: a module that runs in several checkpointed segments needs use_reentrant=False"
            )
        unit.take_grad(bucket, parameter)
        self._advance(unit)

    # Forward

    def enter_forward(self, unit: Unit, *, has_grad: bool) -> None:
        """Gather a unit that is about to run, and the next ones.

        Args:
            unit: The unit.
            has_grad: Whether this forward pass may have a backward pass.
        """
        if self.in_backward:  # activations are computed again
            self._check_running(unit)
            self._gather(unit)
            unit.finish_gather()
            unit.is_in_use = True
            return
        if unit is self.root:
            self._begin_forward()
        if unit not in self._seen:
            self._seen.append(unit)
        if has_grad:
            unit.num_open += 1
        self._gather(unit)
        unit.finish_gather()
        unit.is_in_use = True
        self._prefetch(unit, 1)

    def leave_forward(self, unit: Unit, *, has_grad: bool) -> None:
        """Reshard a unit that has run, unless its backward is near.

        Args:
            unit: The unit.
            has_grad: Whether this forward pass may have a backward pass.
        """
        if self.in_backward:
            unit.is_in_use = unit.is_entered
            return
        unit.is_in_use = not unit.reshards
        if not has_grad or (unit.reshards and not self._is_first_in_backward(unit)):
            if has_grad:
                unit.keep()
            unit.reshard()
        if unit is self.root:
            self._order = self._seen + [other for other in self.units if other not in self._seen]
            if not has_grad:
                self._reshard_all()

    def _check_running(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{unit.name}: forward after a backward pass that failed\n"
                "  fix: end the job; ranks may have taken part in different collectives"
            )

    def _begin_forward(self) -> None:
        self._seen = []
        self._reshard_all()  # what an earlier pass left gathered may be out of date
        for unit in self.units:
            unit.has_kept = False
            for bucket in unit.buckets:
                bucket.refresh()
        for group in reversed(self.groups):
            group.send_weights(self._wire)

    def _is_first_in_backward(self, unit: Unit) -> bool:
        """Whether a unit is among the last that fit the slots, so that backward finds it gathered."""
        shared = [other for other in self._order if other.is_leaf and other.reshards and other is not self.root]
        return unit in shared[-(self._options.prefetch + 1) :]

    def _reshard_all(self) -> None:
        for unit in self.units:
            if unit.state is not State.sharded:
                unit.reshard()

    def _gather(self, unit: Unit) -> None:
        if unit.state is not State.sharded:
            return
        slot = unit.weights_slot
        assert slot is not None
        holder = slot.holder
        if isinstance(holder, Unit) and holder is not unit:
            if holder.is_in_use and not holder.has_passed:
                raise RuntimeError(
                    f"{holder.name} and {unit.name}: both run at the same time, but share memory for gathered weights\n"
                    f"  fix: call hp_fully_shard(..., reshard_after_forward=False) for one of them"
                )
            holder.reshard()
        slot.holder = unit
        for bucket in unit.buckets:
            if bucket.is_trainable:
                self._group[id(bucket)].wait_weights()
        unit.begin_gather()

    def _prefetch(self, unit: Unit, direction: int) -> None:
        if unit not in self._order:
            return
        place = self._order.index(unit)
        for step in range(1, self._options.prefetch + 1):
            near = place + direction * step
            if not 0 <= near < len(self._order):
                return
            other = self._order[near]
            if other.weights_slot is not None and other.weights_slot.holder in (None, other):
                self._gather(other)

    # Backward

    def enter_backward(self, unit: Unit) -> None:
        """Gather a unit whose backward is about to run, and give its gradients a place.

        Args:
            unit: The unit.
        """
        if not self.in_backward:
            self._begin_backward()
        self._gather(unit)
        unit.finish_gather()
        unit.is_in_use = True
        if not unit.is_entered:
            unit.is_entered = True
            self._open_grads(unit)
        self._prefetch(unit, -1)

    def leave_backward(self, unit: Unit) -> None:
        """Reshard a unit whose inputs have their gradients.

        Args:
            unit: The unit.
        """
        unit.num_open = max(0, unit.num_open - 1)
        unit.has_passed = True
        if unit.num_open == 0:
            unit.is_complete = True  # parameters without a gradient are not used in this pass
        if unit.is_complete or not unit.is_missing_grads:
            unit.is_complete = True
            unit.reshard()
            self._drain()

    def _begin_backward(self) -> None:
        self.in_backward = True
        self._queue = [unit for unit in reversed(self._order) if unit.trainable]
        for unit in self.units:
            unit.is_entered = unit.is_complete = unit.is_reduced = unit.has_passed = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _open_grads(self, unit: Unit) -> None:
        if not unit.trainable:
            return
        if unit.grads is None:
            slot = self._grad_slots[id(unit)]
            if isinstance(slot.holder, Unit) and slot.holder is self._settling:
                self._settle()
            if slot.holder is not None or not self.syncs:  # held until a later micro-batch
                slot = self._own_grad_slots.setdefault(id(unit), Slot(unit.grad_bytes, self.device))
            unit.open_grads(slot)
        unit.expect_grads()

    def _advance(self, unit: Unit) -> None:
        if unit.is_missing_grads:
            return
        unit.is_complete = True
        if unit.is_leaf and not unit.has_boundary:
            unit.reshard()
        self._drain()

    def _drain(self) -> None:
        """Begin the reductions whose turn it is."""
        while self._queue and self._queue[0].is_complete:
            self._reduce(self._queue.pop(0))

    def _reduce(self, unit: Unit) -> None:
        if not self.syncs:
            return
        unit.is_reduced = True
        if unit.grads is None:  # backward did not reach it; other ranks' may have
            self._open_grads(unit)
        assert unit.grads is not None
        unit.pending = [
            bucket.reduce(flat, self._group[id(bucket)].out(bucket))
            for bucket, flat in zip(unit.trainable, unit.grads, strict=True)
        ]
        self._settle()
        self._settling = unit

    def _settle(self) -> None:
        """Wait for the last reduction over the shard axis; begin that between replicas if a group is full."""
        unit, self._settling = self._settling, None
        if unit is None:
            return
        wait_for(unit.pending, "reduce-scatter of gradients of {}", unit.name)
        unit.close_grads()
        for bucket in unit.trainable:
            group = self._group[id(bucket)]
            group.settle(bucket)
            if self.all_reduces and group.is_full:
                group.begin(self._wire)

    def _end_backward(self) -> None:
        for unit in self._queue:
            unit.is_complete = True
        self._drain()
        self._settle()
        if self.syncs:
            for group in self.groups:
                if self.all_reduces:
                    group.finish()
                    group.is_stale |= not self._is_watched
                else:
                    group.keep_partial()
        self._reshard_all()
        self.in_backward = False
        for unit in self.units:
            unit.is_in_use = unit.is_entered = unit.is_reduced = False

    # Outside of a step

    def group_of(self, bucket: Bucket) -> Group:
        """The group of a trainable bucket."""
        return self._group[id(bucket)]

    def reshard(self) -> None:
        """Register the shards of all units, whatever the last pass left gathered."""
        self._reshard_all()

    def settle_weights(self) -> None:
        """Reshard, and bring every shard up to date with its owner's. All ranks must call it."""
        self._reshard_all()
        for group in self.groups:
            group.send_weights(self._wire)
            group.wait_weights()
            group.send_shards(self._wire)

    def note_update(self) -> None:
        """Owners have updated weights: the next forward sends them. torch's optimizers call this by themselves.

        All ranks must call it alike.
        """
        self._is_watched = True
        for group in self.groups:
            group.is_stale = True


_WATCHED: "weakref.WeakSet[Schedule]" = weakref.WeakSet()


def _watch_optimizers(schedule: Schedule) -> None:
    """Learn of every step of every torch optimizer: whether weights changed must not depend on a rank's own data."""
    _register_hook()
    _WATCHED.add(schedule)


@cache
def _register_hook() -> None:
    register_optimizer_step_post_hook(_note_updates)


def _note_updates(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for schedule in _WATCHED:
        schedule.note_update()
