"""The parameters of a unit that share one all-gather and one reduce-scatter."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hp_muon_plugin.fsdp.channels import Channels
from hp_muon_plugin.fsdp.mesh import ShardMesh
from hp_muon_plugin.fsdp.packing import Packing, Unpacking
from hp_muon_plugin.fsdp.parameter import Original, Parameter
from hp_muon_plugin.fsdp.unused import mark, unmark_rounded
from hp_muon_plugin.layout.bucket import BucketLayout
from hp_muon_plugin.layout.per_param import PerParamLayout
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import Handle, Wire, wait_for


class Bucket:
    """Parameters of one type, whole in one buffer while gathered, one equal range of it on each rank.

    Attributes:
        layout: Where parameters lie.
        mesh: Ranks that shard and replicate it.
        parameters: In buffer order.
        places: First element of each in this rank's shard.
        is_trainable: Whether its parameters have gradients; a bucket has only one kind.
        master: ``(shard_numel,)`` this rank's shard in the type of the parameters; the shards are views of it.
        compute: ``(shard_numel,)`` in the compute type: what is gathered. ``master`` itself if the types agree.
        reduce_dtype: Type of gradient buffers.
        grad: ``(shard_numel,)`` reduced gradient in ``reduce_dtype``, from :meth:`attach_grad`.
        grad_views: The same for each parameter, in the shape of its shard.
        channels: Of its messages; the model numbers its buckets.
        unused: Parameters that this rank did not use for what was reduced last.
        divisor: By what summed gradients are divided.
    """

    def __init__(
        self,
        layout: BucketLayout,
        originals: Sequence[Original],
        mesh: ShardMesh,
        wire: Wire,
        *,
        shard_axis: AxisGroup,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        divisor: float | None,
    ) -> None:
        first = originals[0].parameter
        self.layout, self.mesh, self._wire = layout, mesh, wire
        self.shard_axis = shard_axis  # an axis of one rank for replicated parameters
        self.channels = Channels(shard_axis, 0)
        self.is_trainable = first.requires_grad
        self.compute_dtype = param_dtype if param_dtype is not None and first.is_floating_point() else first.dtype
        self.reduce_dtype = reduce_dtype or self.compute_dtype
        self.divisor = float(mesh.size if divisor is None else divisor)
        self._take(first.dtype, first.device)
        by_name = {original.name: original for original in originals}
        self.places = [layout.place_in_shard(index, shard_axis.index) for index in range(len(layout.placements))]
        self.parameters = [
            self._parameter(index, by_name[placement.name]) for index, placement in enumerate(layout.placements)
        ]
        self.grad: torch.Tensor | None = None
        self._packing = Packing(layout) if isinstance(layout, PerParamLayout) else None
        self.grad_views: list[torch.Tensor] = []
        self.unused: Sequence[int] = ()
        self._published: dict[int, tuple[Any, int]] = {}  # gradients of another type, and their versions

    @property
    def is_sharded(self) -> bool:
        """Whether gathered weights need memory of their own: not if this rank's shard is the whole."""
        return self.shard_axis.size > 1

    @property
    def is_reduced_in_place(self) -> bool:
        """Whether autograd can write gradients into the buffer that is reduced."""
        return self.reduce_dtype is self.compute_dtype

    def _take(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take memory for the shard, zeroed, and for its compute copy if that is of another type."""
        self.master = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        is_cast = self.compute_dtype is not dtype
        self.compute = torch.empty_like(self.master, dtype=self.compute_dtype) if is_cast else self.master

    def _parameter(self, index: int, original: Original) -> Parameter:
        placement = self.layout.placements[index]
        parameter = Parameter(
            original.name, original.parameter, original.places, placement, compute_dtype=self.compute_dtype
        )
        start, stop = self.layout.span(index, self.shard_axis.index)
        place = self.places[index]
        flat = self.master[place : place + stop - start]
        if not original.parameter.is_meta:
            with torch.no_grad():
                flat.copy_(original.parameter.detach().reshape(-1)[start:stop])
        parameter.shard(flat, start, stop, original.parameter)
        return parameter

    def materialize(self, whole: torch.Tensor) -> None:
        """Take memory on a device, and this rank's range of whole parameters.

        Args:
            whole: ``(num_shards * shard_numel,)`` in the type of the shards; its device is the bucket's.
        """
        self._take(whole.dtype, whole.device)
        for index, parameter in enumerate(self.parameters):
            info, original = parameter.sharded.hp_shard, parameter.sharded  # type: ignore[attr-defined]
            parameter.full = nn.Parameter(
                torch.empty(0, dtype=self.compute_dtype, device=whole.device), requires_grad=original.requires_grad
            )
            place, count = self.places[index], info.stop - info.start
            first = parameter.placement.offset + info.start
            self.master[place : place + count] = whole[first : first + count]
            parameter.shard(self.master[place : place + count], info.start, info.stop, original)

    def gather_master(self) -> torch.Tensor:
        """Gather the shards in their own type. All ranks of the shard axis must call it.

        Returns:
            ``(num_shards * shard_numel,)``, a new tensor.
        """
        flat = torch.empty(self.layout.numel, dtype=self.master.dtype, device=self.master.device)
        axis = self.shard_axis
        wait_for([self._gather(flat, self.master, axis)], "all-gather of shards over {}", axis.axis)
        return flat

    def _gather(self, flat: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        if self._packing is None or not self.is_sharded:
            return self._wire.all_gather(flat, source, axis)
        stage = self._packing.stage(flat)
        return Unpacking(self._wire.all_gather(stage, source, axis), self._packing, stage, flat)

    def refresh(self) -> None:
        """Bring the compute copy up to date with the shards that the optimizer changed."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def adopt(self, owners: Sequence[int]) -> None:
        """Bring shards that other replicas own up to date with the compute copy, which :meth:`refresh` reads.

        Args:
            owners: Place on the replicate axis of who updates each parameter.
        """
        if self.compute is self.master:
            return
        for index, (parameter, owner) in enumerate(zip(self.parameters, owners, strict=True)):
            if owner != self.mesh.replicate.index and parameter.sharded.numel():
                parameter.sharded.data.copy_(self.shard_view(self.compute, index))

    def gather(self, flat: torch.Tensor) -> Handle:
        """Begin to gather the bucket.

        Args:
            flat: ``(num_shards * shard_numel,)`` compute type, receives it; every rank of the shard axis.

        Returns:
            What to wait for.
        """
        # shard axis, shard_numel * itemsize bytes from each rank; the unit's forward or backward waits
        return self._gather(flat, self.compute, self.channels.gather)

    def gather_near(self, flat: torch.Tensor, kept: torch.Tensor, near: AxisGroup | None) -> Handle:
        """Begin to gather the bucket from neighbours that keep parts of it.

        Args:
            flat: ``(num_shards * shard_numel,)`` compute type, receives it.
            kept: This rank's part, ``1 / near.size`` of it.
            near: The neighbours.

        Returns:
            What to wait for.
        """
        assert near is not None
        # part of the shard axis, num_shards * shard_numel * itemsize / near.size bytes from each; backward waits
        return self._wire.all_gather(flat, kept, self.channels.near(near))

    def attach_grad(self, flat: torch.Tensor) -> None:
        """Give reduced gradients their place.

        Args:
            flat: ``(shard_numel,)`` in ``reduce_dtype``.
        """
        self.grad = flat
        self.grad_views = [self.shard_view(flat, index) for index in range(len(self.parameters))]

    def grad_view(self, parameter: Parameter) -> torch.Tensor:
        """Where a parameter's reduced gradient lies, after :meth:`attach_grad`.

        Args:
            parameter: One of the bucket.

        Returns:
            A view in ``reduce_dtype`` of the shape of the shard.
        """
        return self.grad_views[self.parameters.index(parameter)]

    def copy_from_replica(self, index: int) -> None:
        """Take one replica's shard. All ranks of the replicate axis must call it.

        Args:
            index: Its place on the replicate axis.
        """
        # replicate axis, shard_numel * itemsize bytes, once; the host waits
        axis = self.mesh.replicate
        wait_for([self._wire.broadcast(self.master, index, axis)], "broadcast of shards over {}", axis.axis)
        self.refresh()

    def shard_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Where a parameter's shard lies in a buffer of this rank's range.

        Args:
            flat: ``(shard_numel,)``.
            index: The parameter's.
        """
        sharded, place = self.parameters[index].sharded, self.places[index]
        return flat[place : place + sharded.numel()].view(sharded.shape)

    @property
    def has_grad(self) -> bool:
        """Whether reduced gradients of earlier micro-batches are there."""
        return any(parameter.sharded.grad is not None for parameter in self.parameters)

    def reduce(self, full: torch.Tensor, out: torch.Tensor, unused: Sequence[int] = ()) -> Handle:
        """Begin to reduce whole gradients to shards.

        Args:
            full: ``(num_shards * shard_numel,)`` ``reduce_dtype``, this rank's gradients; destroyed.
            out: ``(shard_numel,)`` ``reduce_dtype``, receives the sum of this rank's range.
            unused: Parameters that have no gradient here, and are to have none if they have none anywhere.

        Returns:
            What to wait for.
        """
        if self.reduce_dtype is torch.float16:
            unmark_rounded(full.mul_(1.0 / self.divisor))  # sums of float16 overflow
        self.unused = unused
        mark([self.parameters[index].view_of(full) for index in unused])
        # shard axis, num_shards * shard_numel * itemsize bytes; the next unit's reduction or the end waits
        if not self.is_sharded:  # one rank, or replicated parameters
            out.copy_(full)
            return self._wire.all_reduce(out, self.mesh.shard)
        if self._packing is not None:
            stage = self._packing.stage(full)
            self._packing.pack(full, stage)
            full = stage
        return self._wire.reduce_scatter(out, full, self.channels.reduce)

    def rebase(self, flat: torch.Tensor) -> None:
        """Let the compute shard lie elsewhere, and with it the shards if they are of the same type.

        Args:
            flat: ``(shard_numel,)`` in the compute type.
        """
        if self.compute is not self.master:
            self.compute = flat
            return
        flat.copy_(self.master)
        for index, parameter in enumerate(self.parameters):
            parameter.sharded.data = self.shard_view(flat, index)
        self.master = self.compute = flat

    def receiving(self, owners: Sequence[int] | None) -> list[int]:
        """Parameters whose shards are to have gradients on this rank, if they were used.

        Args:
            owners: Place on the replicate axis of who updates each parameter; the others' shards get no
                gradient, so that optimizers keep no state for them. None: every replica updates all.
        """
        mine = self.mesh.replicate.index
        owned = [index for index in range(len(self.parameters)) if owners is None or owners[index] == mine]
        return [index for index in owned if self.parameters[index].sharded.requires_grad]  # not frozen since

    def publish(self, indices: Iterable[int]) -> None:
        """Make reduced gradients the ``grad`` of the shards of some parameters."""
        assert self.grad is not None
        for index in indices:
            sharded, view = self.parameters[index].sharded, self.grad_views[index]
            if not self._is_held(index):
                view = self.grad_views[index] = self.shard_view(self.grad, index)
            if view.dtype is sharded.dtype:
                sharded.grad = view
            else:
                sharded.grad = view.to(sharded.dtype)
                self._published[index] = weakref.ref(sharded.grad), sharded.grad._version

    def is_published(self, index: int, grad: torch.Tensor) -> bool:
        """Whether the gradient of a parameter's shard is what :meth:`publish` made it, so that the buffer holds it."""
        if self.reduce_dtype is self.master.dtype:
            return grad is self.grad_views[index] and self._is_held(index)
        told, version = self._published.get(index, (lambda: None, 0))
        return told() is grad and grad._version == version

    def _is_held(self, index: int) -> bool:
        """Whether a view of reduced gradients lies in the buffer still; ``module.to()`` and the like move it."""
        assert self.grad is not None
        view, place = self.grad_views[index], self.places[index]
        return not view.numel() or view.data_ptr() == self.grad.data_ptr() + place * self.grad.element_size()
