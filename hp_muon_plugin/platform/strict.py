"""A wire for tests that enforces HCCL's rules, so that what passes on gloo has a chance on an NPU.

What one rank can see is in :mod:`hp_muon_plugin.platform.strict_rules`. Here is what takes time or
other ranks:

* A result cannot be read early, nor a source changed late: the collective runs on copies, the
  caller's buffers are full of NaN (integers: the largest value) until ``wait()``, and must still be.
* Reduce inputs are destroyed, as HCCL's zero-copy mode does.
* Ranks agree on every call. Each rank writes what it calls into the job's store, which never waits,
  and compares before the collective starts, which is in the first ``wait()`` after the call. A rank
  whose call is refused says so there too, so that the others do not hang.
* Groups that share ranks are first used in one order; :meth:`StrictWire.verify` compares.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.first_use import FirstUses, find_conflict
from hp_muon_plugin.platform.protocol import Collective, Expected, Handle, Wire
from hp_muon_plugin.platform.strict_rules import (
    UNSUPPORTED_SIZES,
    Call,
    Rule,
    StrictError,
    StrictWarning,
    check_call,
    overlaps,
)

_INSTANCES = itertools.count()  # ranks make their strict wires in one order, as everything else


class StrictWire:
    """Passes calls on after checking them.

    Args:
        wire: What does the work.
        patience_s: How long a rank waits for the others to issue a call.
    """

    def __init__(self, wire: Wire, *, patience_s: float = 20.0) -> None:
        self._wire = wire
        self._patience = timedelta(seconds=patience_s)
        self._prefix = f"hp_muon_strict/{next(_INSTANCES)}"
        self._num_calls: dict[str, int] = {}
        self._pending: list[_StrictHandle] = []
        self._first_uses = FirstUses()

    def expect(self, kind: Collective, tensor: torch.Tensor, axis: AxisGroup, *, owner_index: int) -> Expected | None:
        """See :meth:`Wire.expect`. HCCL knows no announcements: a broadcast's buffer is poisoned, and that is all."""
        if kind is Collective.BROADCAST and axis.index != owner_index:
            poison(tensor)
        return None

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_gather`."""
        call = Call(Collective.ALL_GATHER, axis, output, source)
        key = self._announce(call)
        result = torch.empty_like(output)
        held = source.data.clone()
        if call.is_in_place_gather():
            held = result[axis.index * source.numel() :][: source.numel()].copy_(held)
        start = partial(self._wire.all_gather, result, held, axis)
        read = [] if call.is_in_place_gather() else [source]
        return self._issue(_StrictHandle(self, call, key, start, written=[output], read=read, result=result))

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.reduce_scatter`."""
        call = Call(Collective.REDUCE_SCATTER, axis, output, source)
        key = self._announce(call)
        result, held = torch.empty_like(output), source.data.clone()
        start = partial(self._wire.reduce_scatter, result, held, axis)
        return self._issue(_StrictHandle(self, call, key, start, written=[output, source], read=[], result=result))

    def all_reduce(self, tensor: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_reduce`."""
        call = Call(Collective.ALL_REDUCE, axis, tensor, tensor)
        return self._in_place(call, lambda held: self._wire.all_reduce(held, axis), keeps_result=True)

    def reduce(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.reduce`."""
        call = Call(Collective.REDUCE, axis, tensor, tensor, owner_index)
        return self._in_place(
            call, lambda held: self._wire.reduce(held, owner_index, axis), keeps_result=axis.index == owner_index
        )

    def broadcast(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.broadcast`."""
        call = Call(Collective.BROADCAST, axis, tensor, tensor, owner_index)
        return self._in_place(
            call,
            lambda held: self._wire.broadcast(held, owner_index, axis),
            keeps_result=True,
            reads_only=axis.index == owner_index,
        )

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int], axis: AxisGroup
    ) -> Handle:
        """See :meth:`Wire.all_to_all`. The ranks compare what they send each other before they do."""
        call = Call(Collective.ALL_TO_ALL, axis, output, source)
        if (sum(received), sum(sent)) != (output.numel(), source.numel()):
            raise StrictError(Rule.LENGTH, f"{call.header()}: receives {list(received)}, sends {list(sent)}")
        key = self._announce(call)
        result, held = torch.empty_like(output), source.data.clone()

        def start() -> Handle:
            self._compare_lengths(key, received, sent, axis)
            return self._wire.all_to_all(result, held, received, sent, axis)

        return self._issue(_StrictHandle(self, call, key, start, written=[output], read=[source], result=result))

    def _compare_lengths(self, key: str, received: Sequence[int], sent: Sequence[int], axis: AxisGroup) -> None:
        if axis.group is None:
            return
        self._tell(f"{key}/sent", axis, ",".join(map(str, sent)))
        _store().wait([f"{key}/sent/{index}" for index in range(axis.size)], self._patience)
        theirs = [_store().get(f"{key}/sent/{index}").decode().split(",")[axis.index] for index in range(axis.size)]
        if [int(count) for count in theirs] != list(received):
            text = f"all_to_all on {axis.axis!r}: place {axis.index} expects {list(received)}, is sent {theirs}"
            raise StrictError(Rule.AGREEMENT, text)

    def verify(self) -> None:
        """Compare over all ranks of the job: is every handle waited for, are first uses in one order?

        A collective over the world, so that all ranks raise the same error.

        Raises:
            StrictError: Naming the ranks.
        """
        mine = ([handle.call.header() for handle in self._pending], self._first_uses.groups)
        every = [mine]
        if dist.is_initialized():
            every = [mine] * dist.get_world_size()
            dist.all_gather_object(every, mine)
        for rank, (unwaited, _) in enumerate(every):
            if unwaited:
                raise StrictError(Rule.WAITED, f"rank {rank} has not waited for {unwaited}")
        conflict = find_conflict([groups for _, groups in every])
        if conflict is not None:
            raise StrictError(Rule.FIRST_USE, conflict)

    def _in_place(
        self, call: Call, start: Callable[[torch.Tensor], Handle], *, keeps_result: bool, reads_only: bool = False
    ) -> Handle:
        key = self._announce(call)
        held = call.output.data.clone()
        return self._issue(
            _StrictHandle(
                self,
                call,
                key,
                lambda: start(held),
                written=[] if reads_only else [call.output],
                read=[call.output] if reads_only else [],
                result=held if keeps_result and not reads_only else None,
            )
        )

    def _announce(self, call: Call) -> str:
        """Check the call and tell the other ranks; returns the place in the store."""
        key = self._next_key(call.axis)
        try:
            check_call(call)
            self._check_in_flight(call)
        except StrictError as error:
            self._tell(key, call.axis, f"refused ({error})")
            raise
        self._tell(key, call.axis, call.header())
        if call.output.numel() == 0 and call.kind is not Collective.ALL_TO_ALL:
            return key
        if call.axis.size in UNSUPPORTED_SIZES and call.kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            text = f"{call.kind} on {call.axis.axis!r}: torch_npu does not support {call.axis.size} ranks"
            warnings.warn(text, StrictWarning, stacklevel=4)
        self._first_uses.record(call.axis)
        return key

    def _check_in_flight(self, call: Call) -> None:
        is_owner = call.kind is Collective.BROADCAST and call.axis.index == call.owner_index
        writes = [] if is_owner else [call.output]
        if call.kind is Collective.REDUCE_SCATTER:
            writes.append(call.source)
        for other in self._pending:
            touched = [(mine, theirs) for theirs in other.written for mine in (call.output, call.source)]
            touched += [(mine, theirs) for theirs in other.read for mine in writes]
            if any(overlaps(mine, theirs) for mine, theirs in touched):
                raise StrictError(Rule.IN_FLIGHT, f"{call.header()} while {other.call.header()} is under way")

    def _issue(self, handle: "_StrictHandle") -> Handle:
        self._pending.append(handle)
        return handle

    def _next_key(self, axis: AxisGroup) -> str:
        if axis.group is None:
            return ""
        name = axis.group.group_name
        self._num_calls[name] = self._num_calls.get(name, 0) + 1
        return f"{self._prefix}/{name}/{self._num_calls[name]}"

    def _tell(self, key: str, axis: AxisGroup, text: str) -> None:
        if axis.group is not None:
            _store().set(f"{key}/{axis.index}", text)

    def _start_all(self) -> None:
        """Start what was issued, in order: ranks that wait in different orders still meet."""
        for handle in self._pending:
            if handle.inner is None:
                self._check_agreement(handle)
                handle.inner = handle.start()

    def _check_agreement(self, handle: "_StrictHandle") -> None:
        axis = handle.call.axis
        if axis.group is None:
            return
        keys = [f"{handle.key}/{index}" for index in range(axis.size)]
        mine = handle.call.header()
        try:
            _store().wait(keys, self._patience)
        except RuntimeError as error:
            silent = [index for index, key in enumerate(keys) if not _store().check([key])]
            text = f"places {silent} of {axis.axis!r} do not join place {axis.index}'s {mine}"
            raise StrictError(
                Rule.AGREEMENT, f"{text}; this rank's groups, by first use: {self._first_uses}"
            ) from error
        for index, key in enumerate(keys):
            theirs = _store().get(key).decode()
            if theirs != mine:
                text = f"on {axis.axis!r}, place {axis.index} calls {mine} and place {index} {theirs}"
                raise StrictError(Rule.AGREEMENT, text)


class _StrictHandle:
    """A call under way, and what its buffers must still hold when it ends."""

    def __init__(
        self,
        wire: StrictWire,
        call: Call,
        key: str,
        start: Callable[[], Handle],
        *,
        written: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
        result: torch.Tensor | None,
    ) -> None:
        self._wire = wire
        self.call = call
        self.key = key
        self.start = start
        self.inner: Handle | None = None
        self.written = written
        self.read = read
        self._result = result
        for tensor in written:
            poison(tensor)
        self._expected = [tensor.data.clone() for tensor in (*written, *read)]

    def wait(self) -> None:
        if self not in self._wire._pending:
            return
        self._wire._start_all()
        assert self.inner is not None
        self.inner.wait()
        self._wire._pending.remove(self)
        for tensor, expected in zip((*self.written, *self.read), self._expected, strict=True):
            if not torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)):
                raise StrictError(Rule.TOUCHED, f"{self.call.header()} on {self.call.axis.axis!r}")
        if self._result is not None:
            self.call.output.data.copy_(self._result)  # .data: c10d leaves autograd's version counters alone


def poison(tensor: torch.Tensor) -> None:
    """Fill a buffer with what no test can mistake for a result.

    Args:
        tensor: Filled with NaN, or with the largest value of an integer dtype.
    """
    tensor.data.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _store() -> distributed_c10d.Store:
    return distributed_c10d._get_default_store()
