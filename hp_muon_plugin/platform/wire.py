"""Asynchronous collectives on flat buffers: what the sharded engine sends, and nothing else.

Every buffer is contiguous and one-dimensional, and all ranks of an axis pass buffers of the same
length. Sums are plain: nothing here averages, because HCCL only emulates averages; callers scale
first. An axis of one rank goes the same way as any other: its buffers are copied, its handles are
finished. Empty buffers start no collective, as all ranks agree that they are empty.

CPU tensors take their own route (gloo): all but all-reduce and all-to-all is messages that are under way at once
(:mod:`hp_muon_plugin.platform.direct`). gloo's reduce-scatter is an all-reduce of a clone, twice the
bytes; its reduce scatters and then gathers, half as many bytes again; its all-gather waits for one
neighbour at a time. Here whoever keeps a sum receives all of it and adds. gloo's all-reduce stays: over a slow
link its small pieces took 4 to 7 % less time than one message each way between two ranks.
What is copied or summed here is written through ``.data``, so that autograd's version counters stay
as they are, as with every collective of c10d.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.collectives import AxisGroup, all_gather_function, reduce_scatter_function
from hp_muon_plugin.platform.direct import Expected, Started, broadcast, exchange, expect, gather, others
from hp_muon_plugin.platform.failures import NotBegun, failure
from hp_muon_plugin.platform.protocol import Collective, Handle, Wire
from hp_muon_plugin.platform.scratch import Scratch

__all__ = ["C10dWire", "Collective", "Finished", "Handle", "Wire", "wait_for"]

SUM_BLOCK = 1 << 17  # elements summed at a time: a block's partial sums stay in the cache
_HALVES = (torch.bfloat16, torch.float16)
_PAIR = 2


class Finished:
    """The handle of what is already done."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class C10dWire:
    """The wire over torch.distributed.

    On CPU, ``reduce_scatter`` adds the ranks' slices in axis order, whatever their position in the
    buffer, so that equal inputs give equal bits however they are packed. Sums of bf16 and fp16 are
    held in fp32 and rounded once there. That happens in ``wait()``, on the calling thread. Its
    scratch is kept for the next call of the same dtype and no larger size.
    """

    def __init__(self) -> None:
        self._gather = all_gather_function()
        self._scatter = reduce_scatter_function()
        self._scratch = Scratch()

    def expect(self, kind: Collective, tensor: torch.Tensor, axis: AxisGroup, *, owner_index: int) -> Expected | None:
        """See :meth:`Wire.expect`."""
        group = axis.group
        if group is None or tensor.numel() == 0 or tensor.device.type != "cpu":
            return None
        if kind is Collective.BROADCAST:
            return expect(group, {} if axis.index == owner_index else {owner_index: tensor}, None)
        assert kind is Collective.REDUCE, kind
        return expect(group, *(self._arriving(tensor, axis) if axis.index == owner_index else ({}, None)))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_gather`."""
        assert output.numel() == axis.size * source.numel(), (output.shape, source.shape, axis)
        if source.numel() == 0:
            return Finished()
        if axis.group is None:
            return _copied(output, source)
        if output.device.type == "cpu":
            _copied(output.view(axis.size, source.numel())[axis.index], source)
            return _Pending(gather(output, source, axis, axis.group), (output, source))
        # (size - 1) / size of output arrives on each rank
        return _pending(partial(self._gather, output, source, group=axis.group), output, source)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.reduce_scatter`."""
        assert source.numel() == axis.size * output.numel(), (output.shape, source.shape, axis)
        if output.numel() == 0:
            return Finished()
        if axis.group is None:
            return _copied(output, source)
        if output.device.type == "cpu":
            return self._exchange_and_sum(output, source, axis, axis.group)
        # (size - 1) / size of source leaves each rank
        return _pending(partial(self._scatter, output, source, op=dist.ReduceOp.SUM, group=axis.group), output, source)

    def all_reduce(self, tensor: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_reduce`."""
        if axis.group is None or tensor.numel() == 0:
            return Finished()
        # twice (size - 1) / size of tensor leaves each rank; positional, as MindSpeed's wrapper wants it
        return _pending(partial(dist.all_reduce, tensor, op=dist.ReduceOp.SUM, group=axis.group), tensor)

    def reduce(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.reduce`."""
        assert 0 <= owner_index < axis.size, (owner_index, axis)
        if axis.group is None or tensor.numel() == 0:
            return Finished()
        if tensor.device.type == "cpu":
            return self._collect_and_sum(tensor, owner_index, axis, axis.group, expected)
        owner = dist.get_global_rank(axis.group, owner_index)
        # (size - 1) / size of tensor leaves each rank and arrives at the owner
        return _pending(partial(dist.reduce, tensor, owner, dist.ReduceOp.SUM, axis.group), tensor)

    def broadcast(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.broadcast`."""
        assert 0 <= owner_index < axis.size, (owner_index, axis)
        if axis.group is None or tensor.numel() == 0:
            return Finished()
        if tensor.device.type == "cpu":
            return _Pending(broadcast(tensor, owner_index, axis, axis.group, expected=expected), (tensor,))
        owner = dist.get_global_rank(axis.group, owner_index)
        # all of tensor arrives at each rank but the owner
        return _pending(partial(dist.broadcast, tensor, owner, axis.group), tensor)

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int], axis: AxisGroup
    ) -> Handle:
        """See :meth:`Wire.all_to_all`."""
        assert len(received) == len(sent) == axis.size, (received, sent, axis)
        if axis.group is None:
            return _copied(output, source)
        # source leaves each rank, but for its own stretch
        start = partial(dist.all_to_all_single, output, source, list(received), list(sent), group=axis.group)
        return _pending(start, output, source)

    def _exchange_and_sum(
        self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup, group: dist.ProcessGroup
    ) -> Handle:
        rows = list(source.view(axis.size, output.numel()))
        scratch = self._scratch.take((axis.size - 1) * output.numel(), source.dtype)
        arriving = dict(zip(others(axis), scratch.view(axis.size - 1, output.numel()), strict=True))
        # (size - 1) / size of source leaves each rank, half of what gloo's own reduce-scatter sends
        works = exchange(group, {place: rows[place] for place in arriving}, arriving, channel=axis.channel)

        def add() -> None:
            self._sum_rows(output, [arriving.get(place, row) for place, row in enumerate(rows)])
            self._scratch.give(scratch)

        return _Pending(works, (output, source), add)

    def _collect_and_sum(
        self,
        tensor: torch.Tensor,
        owner_index: int,
        axis: AxisGroup,
        group: dist.ProcessGroup,
        expected: Expected | None,
    ) -> Handle:
        # all of tensor leaves each rank but the owner; gloo's own reduce sends half as much again
        if axis.index != owner_index:
            return _Pending(exchange(group, {owner_index: tensor}, {}, expected=expected), (tensor,))
        if expected is None:
            arriving, scratch = self._arriving(tensor, axis)
            return self._summed(tensor, axis, exchange(group, {}, arriving), arriving, scratch)
        assert expected.scratch is not None
        return self._summed(tensor, axis, expected.works, expected.arriving, expected.scratch)

    def _arriving(self, tensor: torch.Tensor, axis: AxisGroup) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Where the other ranks' terms of a sum arrive, by place, and the scratch that they lie in."""
        scratch = self._scratch.take((axis.size - 1) * tensor.numel(), tensor.dtype)
        return dict(zip(others(axis), scratch.view(axis.size - 1, tensor.numel()), strict=True)), scratch

    def _summed(
        self,
        tensor: torch.Tensor,
        axis: AxisGroup,
        works: list[Started],
        arriving: Mapping[int, torch.Tensor],
        scratch: torch.Tensor,
    ) -> Handle:
        """Add what arrives to ``tensor`` when it has."""

        def add() -> None:
            self._sum_rows(tensor, [arriving.get(place, tensor) for place in range(axis.size)])
            self._scratch.give(scratch)

        return _Pending(works, (tensor,), add)

    def _sum_rows(self, output: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Add two rows or more, in this order; ``output`` may be one of them."""
        if len(rows) == _PAIR and any(row is output for row in rows):  # in either order the same, and rounded once
            output.data.add_(rows[0] if rows[1] is output else rows[1])
            return
        is_half = output.dtype in _HALVES
        block = self._scratch.take(SUM_BLOCK, torch.float32 if is_half else output.dtype)
        in_place = not is_half and all(row is not output for row in rows[1:])
        for start in range(0, output.numel(), SUM_BLOCK):
            part = output.data[start : start + SUM_BLOCK]
            total = part if in_place else block[: part.numel()]
            total.copy_(rows[0][start : start + SUM_BLOCK])
            for row in rows[1:]:
                total.add_(row[start : start + SUM_BLOCK])
            if not in_place:
                part.copy_(total)
        self._scratch.give(block)


class _Pending:
    """Works under way, with what they read and write: c10d need not hold the buffers itself."""

    __slots__ = ("_finish", "_tensors", "_works")

    def __init__(
        self,
        works: list[Started],
        tensors: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> None:
        # MindSpeed's all_reduce answers None for fp64, after reducing a copy that it drops
        assert None not in works, f"a collective on {tensors[0].dtype} was not started"
        self._works = works
        self._tensors = tensors
        self._finish = finish

    def wait(self) -> None:
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        for work in works:
            assert work is not None
            work.wait()
        if finish is not None:
            finish()
        self._tensors = ()


def _pending(start: Callable[..., dist.Work | None], *tensors: torch.Tensor) -> Handle:
    """Begin a collective. One that cannot be begun, because a rank has ended, fails where it is waited for."""
    try:
        return _Pending([start(async_op=True)], tensors)
    except RuntimeError as error:
        return NotBegun(error)


def _copied(output: torch.Tensor, source: torch.Tensor) -> Handle:
    if output.data_ptr() != source.data_ptr():
        output.data.copy_(source)
    return Finished()


def wait_for(handles: list[Handle], what: str, name: str) -> None:
    """Wait for collectives, and forget them.

    Args:
        handles: What is under way; empty afterwards.
        what: What it is, with ``{}`` for the name.
        name: Of a module or an axis.

    Raises:
        RuntimeError: If a collective failed or could not be begun, saying which.
    """
    try:
        for handle in handles:
            handle.wait()
    except RuntimeError as error:
        raise failure(what, name, error) from error
    handles.clear()
