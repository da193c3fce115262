"""Shards of HP-FSDP in megatron-core's distributed checkpoints.

A model says of whole parameters how they lie in the global model: under which key, at which offset, gate and up of a
gated layer apart. That is asked for with whole parameters registered, and each answer is then cut to this rank's range
of elements. Nothing is gathered, and whoever reads the checkpoint, sharded in another way or not at all, finds the same
global tensors as DistributedDataParallel would have written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from hp_muon_plugin.errors import CheckpointError, ConfigError
from hp_muon_plugin.fsdp.bucket import Bucket
from hp_muon_plugin.fsdp.parameter import Parameter
from hp_muon_plugin.layout.boxes import boxes
from hp_muon_plugin.megatron.units import innermost
from hp_muon_plugin.megatron.versions import core_version

_BOXES_SINCE = (0, 14)
"""Megatron-core took flat ranges of whole tensors before, and takes boxes of any size since."""

Template = Any  # ShardedTensor | ShardedTensorFactory: megatron-core is untyped


def answer_checkpoints(chunk: Any) -> None:
    """Let a model answer for its shards: trainers unwrap it before they ask for its state.

    Args:
        chunk: An ``HpFsdpModel``, complete.
    """
    inner: Any = innermost(chunk.module)
    of_whole = inner.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        chunk.schedule.settle_weights()
        with chunk.whole_parameters() as homes:
            return shard_factories(of_whole(*args, **kwargs), homes)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError("ckpt_format", "torch", "keeps the shards of one data-parallel rank alone", "take torch_dist")

    inner.sharded_state_dict = sharded_state_dict
    inner.state_dict_for_save_checkpoint = refuse


def shard_factories(state: Any, homes: Mapping[torch.nn.Parameter, tuple[Bucket, Parameter]]) -> Any:
    """Cut every whole parameter of a sharded state dict to this rank's range.

    Args:
        state: Of the model, with whole parameters registered; changed in place.
        homes: Where each whole parameter belongs.

    Returns:
        The state; its entries for parameters are factories over the shards.
    """

    def cut(value: Any) -> Any:
        if not isinstance(value, ShardedTensor | ShardedTensorFactory) or value.data not in homes:
            return value
        return _factory(value, *homes[value.data])

    return dict_list_map_inplace(cut, state)


def of_owner(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """A factory for state that one replica alone holds, so that this copy of it is written.

    Args:
        factory: From :func:`shard_factories`.

    Returns:
        A new one.
    """
    return replace(factory, replica_id=(*factory.replica_id[:-1], 0))


def _factory(template: Template, bucket: Bucket, parameter: Parameter) -> ShardedTensorFactory:
    shard = parameter.sharded
    info = shard.hp_shard  # type: ignore[attr-defined]
    cut = _Range(template, tuple(parameter.shape), info.start, info.stop, tuple(shard.shape))
    is_old = core_version().lane < _BOXES_SINCE
    build: Callable[..., Any] = cut.build_flat if is_old else cut.build
    merge: Callable[..., Any] = cut.merge_flat if is_old else cut.merge
    replica_id = (*template.replica_id[:-1], bucket.mesh.replicate.index)
    return ShardedTensorFactory(template.key, shard, build, merge, replica_id)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One box of this rank's range.

    Attributes:
        whole: The tensor that it is a part of.
        offset: Where it lies in that tensor.
        shape: Its shape.
        place: First element in the shard.
        stride: Steps in the shard along its dims.
    """

    whole: ShardedTensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: int
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements in a shard, as a view."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.place)

    def sharded(self, flat: torch.Tensor, replica_id: Any) -> ShardedTensor:
        """It as megatron-core wants it: layers and experts as dims of its own, which boxes of any size need."""
        above = (1,) * self.whole.prepend_axis_num
        inside = zip(self.whole.global_offset, (*(0 for _ in above), *self.offset), strict=True)
        return replace(
            self.whole,
            data=self.of(flat).view(*above, *self.shape),
            dtype=flat.dtype,
            local_shape=(*above, *self.shape),
            global_offset=tuple(first + more for first, more in inside),
            axis_fragmentations=None,
            replica_id=replica_id,
            prepend_axis_num=0,
        )


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of elements of a parameter.

    Attributes:
        template: How the whole parameter lies in the model.
        whole_shape: Its shape.
        start: First element of the range.
        stop: One past the last.
        shape: Shape of the shard.
    """

    template: Template
    whole_shape: tuple[int, ...]
    start: int
    stop: int
    shape: tuple[int, ...]

    def build(self, key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
        """This rank's boxes of the tensors that the parameter is saved as."""
        if self.start == self.stop:
            return LocalNonpersistentObject(data.detach())
        flat = data.detach().reshape(-1)
        return [piece.sharded(flat, replica_id) for piece in self._pieces(key, data.dtype)]

    def merge(self, tensors: Any) -> torch.Tensor:
        """The shard from what was loaded into its boxes."""
        if isinstance(tensors, torch.Tensor):
            return tensors
        merged: torch.Tensor = tensors[0].new_empty(self.stop - self.start)
        for piece, tensor in zip(self._pieces(self.template.key, merged.dtype), tensors, strict=True):
            piece.of(merged).copy_(tensor.view(piece.shape))
        return merged.view(self.shape)

    def build_flat(self, key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
        """The range itself, for versions that take it as such."""
        if self.start == self.stop:
            return LocalNonpersistentObject(data.detach())
        flat, span = data.detach().reshape(-1), slice(self.start, self.stop)
        if isinstance(self.template, ShardedTensorFactory):
            return self.template.build_fn(key, flat, replica_id, span)
        told = {"key": key, "data": flat, "dtype": flat.dtype, "replica_id": replica_id, "flattened_range": span}
        return replace(self.template, **told)

    def merge_flat(self, loaded: Any) -> torch.Tensor:
        """The shard from what was loaded into the range."""
        if self.start == self.stop:
            empty: torch.Tensor = loaded
            return empty
        if isinstance(self.template, ShardedTensorFactory):
            loaded = self.template.merge_fn(loaded)
        shard: torch.Tensor = loaded.view(self.shape)
        return shard

    def _pieces(self, key: str, dtype: torch.dtype) -> Iterator[_Piece]:
        for whole in self._tensors(key, dtype):
            part = whole.data
            assert part is not None
            if part.is_contiguous():
                first = part.storage_offset()
                place = max(self.start - first, 0)
                for box in boxes(tuple(part.shape), place, min(self.stop - first, part.numel())):
                    stride = torch.empty(box.shape, device="meta").stride()
                    yield _Piece(whole, box.offset, box.shape, first + place - self.start, stride)
                    place += torch.Size(box.shape).numel()
            else:
                yield from self._whole_slices(whole, part)

    def _tensors(self, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
        """The tensors that the whole parameter is saved as; their data are views without memory."""
        meta = torch.empty(self.whole_shape, dtype=dtype, device="meta")
        if isinstance(self.template, ShardedTensor):
            whole: ShardedTensor = replace(self.template, key=key, data=meta, dtype=dtype)
            return [whole]
        tensors = self._built(key, meta)
        if all(t.data.untyped_storage()._cdata == meta.untyped_storage()._cdata for t in tensors):
            return tensors
        return [self._as_view(tensor, meta) for tensor in self._built(key, torch.arange(meta.numel()).view(meta.shape))]

    def _built(self, key: str, data: torch.Tensor) -> list[ShardedTensor]:
        built = self.template.build_fn(key, data, self.template.replica_id, None)
        if isinstance(built, ShardedTensor):
            return [built]
        return [found for found in nested_values(built) if isinstance(found, ShardedTensor)]

    def _as_view(self, tensor: ShardedTensor, meta: torch.Tensor) -> ShardedTensor:
        """A tensor that the model copies, such as a transposed expert: where its elements come from, told by numbers.

        Raises:
            CheckpointError: If they do not lie at equal steps.
        """
        numbers: torch.Tensor = tensor.data
        first = int(numbers.reshape(-1)[0])
        steps = [
            int(numbers.movedim(dim, 0).reshape(size, -1)[min(1, size - 1), 0]) - first or 1
            for dim, size in enumerate(numbers.shape)
        ]
        if not numbers.equal(torch.arange(meta.numel()).as_strided(numbers.shape, steps, first)):
            raise CheckpointError(
                f"{tensor.key}: the model saves this weight in another order, of which a shard is no part\n"
                "  fix: take dp=megatron_ddp to save"
            )
        view = meta.as_strided(numbers.shape, steps, first)
        told: ShardedTensor = replace(tensor, data=view, dtype=view.dtype)
        return told

    def _whole_slices(self, whole: ShardedTensor, part: torch.Tensor) -> Iterator[_Piece]:
        """A transposed weight, such as an expert's in megatron-core's grouped layer: slices of dim 0 stay whole."""
        span = sum((size - 1) * step for size, step in zip(part.shape[1:], part.stride()[1:], strict=True)) + 1
        for index in range(part.shape[0]):
            first = int(part.storage_offset() + index * part.stride(0))
            if first >= self.start and first + span <= self.stop:
                offset = (index, *(0 for _ in part.shape[1:]))
                yield _Piece(whole, offset, (1, *part.shape[1:]), first - self.start, tuple(part.stride()))
            elif first < self.stop and first + span > self.start:
                raise CheckpointError(
                    f"{whole.key}: a shard ends inside a matrix that the model saves transposed\n"
                    "  fix: choose a number of data-parallel ranks that divides the experts, or dp=megatron_ddp"
                )
