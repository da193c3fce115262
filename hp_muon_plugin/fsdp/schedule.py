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
from hp_muon_plugin.fsdp.buffers import slots
from hp_muon_plugin.fsdp.changes import take_weights
from hp_muon_plugin.fsdp.grouping import make_groups
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.policy import ScheduleOptions
from hp_muon_plugin.fsdp.reducer import Reducer
from hp_muon_plugin.fsdp.unit import State, Unit
from hp_muon_plugin.platform.wire import Wire


class Schedule:
    """State of one model.

    Attributes:
        units: The root first, then in the order of ``module.modules()``.
        reducer: What becomes of gradients.
        in_backward: Whether a backward pass is under way.
    """

    def __init__(self, units: Sequence[Unit], options: ScheduleOptions, mode: OuterMode, wire: Wire) -> None:
        self.units, self._options, self._wire = list(units), options, wire
        self.root = self.units[0]
        self.in_backward = self._is_watched = False
        self._order = list(self.units)  # as observed in the last forward
        self._seen: list[Unit] = []
        self._take_weights()
        self._check_agreement(mode)
        reach = [bucket for unit in reversed(self.units) for bucket in unit.trainable]
        groups = make_groups(reach, mode, options.outer_bucket_bytes)
        self.reducer = Reducer(self.units, groups, wire, self.device)
        self._assign(self._order)
        self._watch_grads()
        if any(group.segments for group in groups):
            _watch_optimizers(self)

    def _check_agreement(self, mode: OuterMode) -> None:
        meshes = dict.fromkeys(bucket.mesh for unit in self.units for bucket in unit.buckets)
        axes = dict.fromkeys(axis for mesh in meshes for axis in (mesh.shard, mesh.replicate))
        check_agreement(describe(self.units, self._options, mode), list(axes))

    def _assign(self, order: Sequence[Unit]) -> None:
        """Give every unit its slots, for units that run in this order."""
        may_share = [unit.is_leaf and unit.reshards and unit is not self.root for unit in order]
        sizes = [unit.weight_bytes for unit in order]
        for unit, slot in zip(order, slots(sizes, may_share, self._options.prefetch + 1, self.device), strict=True):
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
                self.reshard()

    def _check_running(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{unit.name}: forward after a backward pass that failed\n"
                "  fix: end the job; ranks may have taken part in different collectives"
            )

    def _begin_forward(self) -> None:
        self._seen = []
        self.reshard()  # what an earlier pass left gathered may be out of date
        for group in self.reducer.groups:
            group.wait_weights()
        self._take_weights()
        for unit in self.units:
            unit.begin_forward()
            for bucket in unit.buckets:
                bucket.refresh()
        self._send_weights()

    def _take_weights(self) -> None:
        for unit in self.units:
            take_weights(unit)

    def _send_weights(self) -> None:
        for group in reversed(self.reducer.groups):
            group.expect_weights(self._wire)
        for group in reversed(self.reducer.groups):
            group.send_weights(self._wire)

    def _is_first_in_backward(self, unit: Unit) -> bool:
        """Whether a unit is among the last that fit the slots, so that backward finds it gathered."""
        shared = [other for other in self._order if other.is_leaf and other.reshards and other is not self.root]
        return unit in shared[-(self._options.prefetch + 1) :]

    def reshard(self) -> None:
        """Register the shards of all units, whatever the last pass left gathered."""
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
                self.reducer.group_of(bucket).wait_weights()
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
            self.reducer.open(unit)
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
            self.reducer.drain()

    def _begin_backward(self) -> None:
        self.in_backward = True
        self.reducer.begin(self._order)
        for unit in self.units:
            unit.is_entered = unit.is_complete = unit.is_reduced = unit.has_passed = False
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _advance(self, unit: Unit) -> None:
        if unit.is_missing_grads:
            return
        unit.is_complete = True
        if unit.is_leaf and not unit.has_boundary:
            unit.reshard()
        self.reducer.drain()

    def _end_backward(self) -> None:
        self.reducer.end()
        if self.reducer.syncs and self.reducer.all_reduces and not self._is_watched:
            self._mark_stale()
        self.reshard()
        self.in_backward = False
        for unit in self.units:
            unit.is_in_use = unit.is_entered = unit.is_reduced = False
        self.reducer.run_hooks()

    def _mark_stale(self) -> None:
        for group in self.reducer.groups:
            group.is_stale = bool(group.segments)

    # Outside of a step

    def settle_weights(self) -> None:
        """Reshard, and bring every shard up to date with its owner's. All ranks must call it."""
        self.reshard()
        self._take_weights()
        self._send_weights()
        for group in self.reducer.groups:
            group.wait_weights()
            group.send_shards(self._wire)

    def note_update(self) -> None:
        """Owners have updated weights: the next forward sends them. torch's optimizers call this by themselves.

        All ranks must call it alike.
        """
        self._is_watched = True
        self._mark_stale()


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
