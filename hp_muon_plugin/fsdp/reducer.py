"""Whole gradients of units on their way to reduced shards, in one order on every rank."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.config.choices import OuterMode
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.buffers import Slot, slots
from hp_muon_plugin.fsdp.channels import Channels
from hp_muon_plugin.fsdp.gradient_hooks import run_hooks
from hp_muon_plugin.fsdp.guards import note_parts
from hp_muon_plugin.fsdp.outer import Group
from hp_muon_plugin.fsdp.unit import Unit
from hp_muon_plugin.muon.distributed.shards import GradientListener
from hp_muon_plugin.platform.wire import Wire, wait_for

_NUM_GRAD_SLOTS = 2  # one being written, one being reduced


class Reducer:
    """Reductions of one model's backward passes.

    Attributes:
        groups: Reductions between replicas.
        syncs: Whether backward reduces gradients; False accumulates them whole.
        all_reduces: Whether backward sums over replicas too; False accumulates sums over the shard axis.
        leaves_unused_alone: Whether parameters that no rank used have no gradient; False gives them zeros.
        listener: Who is told what is reduced while backward runs; None publishes all gradients at its end.
    """

    def __init__(self, units: Sequence[Unit], groups: Sequence[Group], wire: Wire, device: torch.device) -> None:
        self.groups, self._wire, self._device = list(groups), wire, device
        self.syncs = self.all_reduces = self.leaves_unused_alone = True
        self._hooked: list[torch.nn.Parameter] = []
        self.listener: GradientListener | None = None
        for number, bucket in enumerate((bucket for unit in units for bucket in unit.buckets), start=1):
            bucket.channels = Channels(bucket.shard_axis, number)
        self._group = {id(bucket): group for group in groups for bucket in group.buckets}
        note_parts(bucket for group in groups if group.mode is not OuterMode.replicate for bucket in group.buckets)
        self._queue: list[Unit] = []
        self._settling: Unit | None = None
        self._own_slots: dict[int, Slot] = {}
        may_share = [unit.is_leaf and unit is not units[0] for unit in units]
        shared = slots([unit.grad_bytes for unit in units], may_share, _NUM_GRAD_SLOTS, device)
        self._slots = {id(unit): slot for unit, slot in zip(units, shared, strict=True)}

    def group_of(self, bucket: Bucket) -> Group:
        """The group of a trainable bucket."""
        return self._group[id(bucket)]

    def begin(self, order: Sequence[Unit]) -> None:
        """Begin a backward pass.

        Args:
            order: Units as forward ran them, then those that did not run; the same on every rank.
        """
        self.forget()
        self._hooked = []
        self._queue = [unit for unit in reversed(order) if unit.trainable]
        if self.syncs and self.all_reduces:
            for group in self.groups:
                group.expect(self._wire)

    def open(self, unit: Unit) -> None:
        """Give a unit's gradients of this backward pass a place.

        Args:
            unit: The unit.
        """
        if not unit.trainable:
            return
        if unit.grads is None:
            slot = self._slots[id(unit)]
            if isinstance(slot.holder, Unit) and slot.holder is self._settling:
                self._settle()
            if slot.holder is not None or not self.syncs:  # held until a later micro-batch
                slot = self._own_slots.setdefault(id(unit), Slot(unit.grad_bytes, self._device))
            unit.open_grads(slot)
        unit.expect_grads()

    def drain(self) -> None:
        """Begin the reductions whose turn it is."""
        while self._queue and self._queue[0].is_complete:
            unit = self._queue.pop(0)
            if self.syncs:
                self._reduce(unit)

    def end(self) -> None:
        """End a backward pass: reduce what is left, and wait for everything."""
        for unit in self._queue:
            unit.is_complete = True  # not reached here, but maybe on another rank
        self.drain()
        self._settle()
        if not self.syncs:
            return
        for group in self.groups:
            if not self.all_reduces:
                group.keep_partial()
            elif group.is_full:
                self._finish(group)

    def listen(self, listener: GradientListener) -> None:
        """Tell somebody what is reduced while backward runs, instead of whoever was told before.

        Args:
            listener: All ranks pass an equal one.
        """
        self.forget()
        self.listener = listener

    def forget(self) -> None:
        """All ranks are about to change reduced gradients: the listener is not to rely on them."""
        if self.listener is not None:
            self.listener.begun()

    def _finish(self, group: Group) -> None:
        """Publish a group's gradients, its sum being under way or done."""
        self._hooked += group.finish()
        if self.listener is not None:
            self.listener.reduced([parameter.sharded for bucket in group.buckets for parameter in bucket.parameters])

    def run_hooks(self) -> None:
        """Let hooks of shards see the gradients of a backward pass that has ended."""
        hooked, self._hooked = self._hooked, []
        run_hooks(hooked)

    def release(self) -> None:
        """Give up the memory of reduced gradients between steps. Their values are lost, views of them stay."""
        for group in self.groups:
            group.scratch = None
            group.grad.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take memory for reduced gradients again, zeros; views are valid again."""
        for group in self.groups:
            last = group.grad.storage_offset() + group.grad.numel()
            storage = group.grad.untyped_storage()
            storage.resize_(max(int(storage.size()), int(last) * group.grad.element_size()))
        for group in self.groups:
            group.grad.zero_()

    def _reduce(self, unit: Unit) -> None:
        unit.is_reduced = True
        if unit.grads is None:
            self.open(unit)
        assert unit.grads is not None
        self._settle()  # first, so that no more than one reduction needs scratch at a time
        unit.pending = [
            bucket.reduce(
                flat, self._group[id(bucket)].out(bucket), unit.unused(bucket) if self.leaves_unused_alone else ()
            )
            for bucket, flat in zip(unit.trainable, unit.grads, strict=True)
        ]
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
                if self.listener is not None and group.axis.size == 1:  # there is no sum to wait for
                    self._finish(group)
