"""HCCL's rules for one call, as far as one rank can tell; see :mod:`hp_muon_plugin.platform.strict`."""

import dataclasses
from enum import StrEnum

import torch

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import Collective

# HCCL API documentation: what its reductions take, and what its copies take beyond that
REDUCED_DTYPES = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16}
)
MOVED_DTYPES = REDUCED_DTYPES | {torch.uint8, torch.float64}
# torch_npu's documentation of all_gather_into_tensor and reduce_scatter_tensor
UNSUPPORTED_SIZES = frozenset({3, 5, 6, 7})
_REDUCTIONS = frozenset({Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.REDUCE})


class Rule(StrEnum):
    """What a call can break."""

    FLOAT64 = "HCCL sums no float64, and MindSpeed's all_reduce drops the result"
    DTYPE = "HCCL has no such collective for this dtype"
    FLAT = "buffers are contiguous and one-dimensional"
    SAME_KIND = "output and source have one dtype and one device"
    LENGTH = "the whole buffer is as long as all shards together"
    OWNER = "the owner is a place on the axis"
    OVERLAP = "output and source overlap only where an all-gather's source is the rank's own slice"
    IN_FLIGHT = "a buffer belongs to its collective until wait()"
    TOUCHED = "no buffer is written between the call and wait()"
    AGREEMENT = "all ranks of an axis issue the same calls, on equally long buffers"
    WAITED = "every handle is waited for"
    FIRST_USE = "groups that share ranks are first used in one order; HCCL connects them then"


class StrictError(AssertionError):
    """A call that works on gloo and not, or not surely, on HCCL.

    Args:
        rule: What it breaks.
        detail: Where, and with what.
    """

    def __init__(self, rule: Rule, detail: str) -> None:
        self.rule = rule
        super().__init__(f"{rule.name}: {rule.value}; here {detail}")


class StrictWarning(UserWarning):
    """A call that HCCL's documentation does not support, but that other backends need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a wire.

    Attributes:
        kind: The collective.
        axis: Its axis.
        output: What it writes; the only buffer of an in-place collective.
        source: What it reads; ``output`` for an in-place collective.
        owner_index: Place of the owner, of a reduce or broadcast.
    """

    kind: Collective
    axis: AxisGroup
    output: torch.Tensor
    source: torch.Tensor
    owner_index: int | None = None

    def header(self) -> str:
        """What all ranks of the axis must agree on."""
        owner = "" if self.owner_index is None else f" owner {self.owner_index}"
        dtype = str(self.output.dtype).removeprefix("torch.")
        if self.kind is Collective.ALL_TO_ALL:  # each rank's lengths are its own
            return f"{self.kind} {dtype}"
        return f"{self.kind} {tuple(self.source.shape)} -> {tuple(self.output.shape)} {dtype}{owner}"

    def is_in_place_gather(self) -> bool:
        """Whether the source is this rank's own slice of an all-gather's output."""
        offset = self.axis.index * self.source.numel() * self.output.element_size()
        return self.kind is Collective.ALL_GATHER and self.source.data_ptr() == self.output.data_ptr() + offset


def check_call(call: Call) -> None:
    """Check what one rank can see.

    Args:
        call: The call, before anything is started.

    Raises:
        StrictError: At the first rule that the call breaks.
    """
    for rule, broken in (
        (Rule.FLOAT64, call.kind in _REDUCTIONS and call.output.dtype == torch.float64),
        (Rule.DTYPE, call.output.dtype not in (REDUCED_DTYPES if call.kind in _REDUCTIONS else MOVED_DTYPES)),
        (Rule.FLAT, not (_is_flat(call.output) and _is_flat(call.source))),
        (Rule.SAME_KIND, (call.output.dtype, call.output.device) != (call.source.dtype, call.source.device)),
        (Rule.LENGTH, not _lengths_fit(call)),
        (Rule.OWNER, call.owner_index is not None and not 0 <= call.owner_index < call.axis.size),
        (Rule.OVERLAP, _overlap_is_wrong(call)),
    ):
        if broken:
            raise StrictError(rule, f"{call.header()} on {call.axis.axis!r}")


def overlaps(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous buffers share memory.

    Args:
        first: Any contiguous tensor.
        second: Another.

    Returns:
        True if some byte belongs to both.
    """
    if first.device != second.device:
        return False
    starts = (first.data_ptr(), second.data_ptr())
    ends = (starts[0] + first.numel() * first.element_size(), starts[1] + second.numel() * second.element_size())
    return max(starts) < min(ends)


def _is_flat(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_contiguous()


def _lengths_fit(call: Call) -> bool:
    if call.kind is Collective.ALL_TO_ALL:
        return True
    whole, part = call.output.numel(), call.source.numel()
    if call.kind is Collective.REDUCE_SCATTER:
        whole, part = part, whole
    shards = call.axis.size if call.kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) else 1
    return whole == shards * part


def _overlap_is_wrong(call: Call) -> bool:
    return call.output is not call.source and overlaps(call.output, call.source) and not call.is_in_place_gather()
