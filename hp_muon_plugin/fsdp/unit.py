"""A unit: the parameters of a module that are gathered, resharded and reduced together."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.buffers import Slot, num_bytes
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.fsdp.policy import UnitOptions
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import Handle, wait_for


class State(Enum):
    """Which form of the parameters exists.

    ``sharded``: shards are registered, gathered weights have no memory. ``gathering``: shards are registered,
    the gather is under way. ``gathered``: gathered weights are registered.
    """

    sharded = auto()
    gathering = auto()
    gathered = auto()


class Unit:
    """What one call of :func:`hp_fully_shard` was given.

    Attributes:
        name: For messages; set by the schedule.
        modules: The modules; one as a rule.
        left: Those of several that have not run in this forward pass.
        buckets: Their parameters, without those of units inside it.
        options: What the user chose.
        state: Which form of the parameters exists.
        is_leaf: Whether no other unit runs inside it, or between its modules; set by the root.
        reshards: Whether gathered weights are given up after forward.
        is_in_use: Whether its weights are read now or saved tensors that point to them may be.
        has_boundary: Whether backward passes through the module's inputs.
        num_open: Forward passes whose backward has not passed the inputs yet.
        is_entered: Whether this backward pass has reached it.
        has_passed: Whether this backward pass has passed its inputs.
        is_complete: Whether this backward pass has all its gradients.
        is_reduced: Whether this backward pass has begun to reduce them.
        has_kept: Whether backward gathers from the neighbours, which keep parts of the gathered weights.
        weights_slot: Memory of gathered weights.
        grads_slot: Memory of whole gradients.
        grads: Whole gradients of trainable buckets, while there are any.
        pending: Reductions under way.
    """

    def __init__(
        self, modules: Sequence[nn.Module], buckets: list[Bucket], options: UnitOptions, near: AxisGroup | None = None
    ) -> None:
        self.modules, self.left = tuple(modules), set[nn.Module]()
        self.buckets, self.options = buckets, options
        self.rename([type(module).__name__ for module in modules])
        self.state = State.sharded
        self.is_leaf = True
        self.reshards = options.reshard_after_forward is not False
        self.is_in_use = self.has_boundary = False
        self.is_entered = self.has_passed = self.is_complete = self.is_reduced = False
        self.num_open = 0
        self.weights_slot: Slot | None = None
        self.grads_slot: Slot | None = None
        self.grads: list[torch.Tensor] | None = None
        self.pending: list[Handle] = []
        self._sharded: list[tuple[Bucket, torch.Tensor]] = []  # with the buffer that each is gathered into
        self._gathers: list[Handle] = []
        self._near, self._kept, self.has_kept = near, list[torch.Tensor](), False
        self.trainable = [bucket for bucket in buckets if bucket.is_trainable]
        self._missing, self._used = set[int](), set[int]()

    def rename(self, names: Sequence[str]) -> None:
        """Say it by the names of its modules.

        Args:
            names: One for each module.
        """
        self.name = names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle`` of the model."""
        raise TypeError(
            f"{self.name}: what hp_fully_shard divided holds buffers and process groups, which can't be copied\n"
            "  fix: copy it before, or take its values by fsdp.whole.full_state_dict or state_dict()"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of gathered weights."""
        return num_bytes(self._weight_pieces)

    @property
    def grad_bytes(self) -> int:
        """Bytes of whole gradients."""
        return num_bytes(self._grad_pieces)

    @property
    def _weight_pieces(self) -> list[tuple[int, torch.dtype]]:
        return [(bucket.layout.numel, bucket.compute_dtype) for bucket in self.buckets if bucket.is_sharded]

    @property
    def _grad_pieces(self) -> list[tuple[int, torch.dtype]]:
        return [(bucket.layout.numel, bucket.reduce_dtype) for bucket in self.trainable]

    def begin_forward(self) -> None:
        """Forget what the last forward pass of the model left."""
        self.has_kept = False
        self.left.clear()

    def begin_run(self) -> None:
        """One of the modules is about to run."""
        if not self.left:
            self.left.update(self.modules)

    def has_run(self, module: nn.Module) -> bool:
        """Note that a module has run.

        Args:
            module: One of this unit's.

        Returns:
            Whether all have.
        """
        self.left.discard(module)
        return not self.left

    def bind(self, slot: Slot) -> None:
        """Choose where gathered weights lie. No saved tensor may point to the place before.

        Args:
            slot: Memory.
        """
        self.weights_slot = slot
        cut = iter(slot.cut(self._weight_pieces))
        self._sharded = [(bucket, next(cut)) for bucket in self.buckets if bucket.is_sharded]
        alone = [(bucket, bucket.compute) for bucket in self.buckets if not bucket.is_sharded]
        for bucket, flat in [*self._sharded, *alone]:
            for parameter in bucket.parameters:
                parameter.bind(flat)

    def begin_gather(self) -> None:
        """Begin to gather, if sharded."""
        if self.state is not State.sharded:
            return
        if self.has_kept:
            pairs = zip(self._sharded, self._kept, strict=True)
            self._gathers = [bucket.gather_near(flat, kept, self._near) for (bucket, flat), kept in pairs]
        else:
            self._gathers = [bucket.gather(flat) for bucket, flat in self._sharded]
        self.state = State.gathering

    def keep(self) -> None:
        """Keep this rank's part of the gathered weights for backward, before they are given up."""
        if self._near is None or not self._sharded:
            return
        parts = [flat.view(self._near.size, -1)[self._near.index] for _, flat in self._sharded]
        if not self._kept:
            self._kept = [torch.empty_like(part) for part in parts]
        for kept, part in zip(self._kept, parts, strict=True):
            kept.copy_(part)
        self.has_kept = True

    def finish_gather(self) -> None:
        """Wait for gathered weights and register them."""
        if self.state is State.gathered:
            return
        self._wait_gathers()
        self._register("full")
        self.state = State.gathered

    def reshard(self) -> None:
        """Give up gathered weights and register the shards."""
        self._wait_gathers()
        if self.state is State.gathered:
            self._register("sharded")
        self.state = State.sharded
        self.is_in_use = False
        if self.weights_slot is not None and self.weights_slot.holder is self:
            self.weights_slot.holder = None

    def _wait_gathers(self) -> None:
        wait_for(self._gathers, "all-gather of {}", self.name)

    def _register(self, form: str) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register(getattr(parameter, form))

    def open_grads(self, slot: Slot) -> None:
        """Take zeroed memory for whole gradients, and let autograd write there.

        Args:
            slot: Memory.
        """
        slot.holder = self
        self._used = set()
        self.grads_slot, self.grads = slot, slot.cut(self._grad_pieces)
        for flat in self.grads:
            flat.zero_()

    def expect_grads(self) -> None:
        """Begin to count gradients of a backward pass."""
        assert self.grads is not None
        self._missing = set()
        for bucket, flat in zip(self.trainable, self.grads, strict=True):
            for parameter in bucket.parameters:
                self._missing.add(id(parameter.full))
                if bucket.is_reduced_in_place:
                    parameter.full.grad = parameter.view_of(flat)

    def take_grad(self, bucket: Bucket, parameter: Parameter) -> None:
        """Account for a gradient that autograd has finished.

        Args:
            bucket: One of the trainable ones.
            parameter: Whose gradient it is.
        """
        if not bucket.is_reduced_in_place and parameter.full.grad is not None and self.grads is not None:
            flat = self.grads[self.trainable.index(bucket)]
            parameter.view_of(flat).add_(parameter.full.grad)
            parameter.full.grad = None
        self._missing.discard(id(parameter.full))
        self._used.add(id(parameter.full))

    def unused(self, bucket: Bucket) -> list[int]:
        """Parameters of which there is no gradient since :meth:`open_grads`.

        Args:
            bucket: One of the trainable ones.

        Returns:
            Places among the bucket's parameters.
        """
        return [index for index, p in enumerate(bucket.parameters) if id(p.full) not in self._used]

    @property
    def is_missing_grads(self) -> bool:
        """Whether some parameter has no gradient of this backward pass yet."""
        return bool(self._missing)

    def close_grads(self) -> None:
        """Give up the memory of whole gradients."""
        for bucket in self.trainable:
            for parameter in bucket.parameters:
                parameter.full.grad = None
        if self.grads_slot is not None:
            self.grads_slot.holder = None
        self.grads = self.grads_slot = None
