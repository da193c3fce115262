"""The collectives that the plugin uses. Only this module knows c10d's names and backends' rules.

Newer torch warns for names that older ones need (``all_gather_into_tensor`` in 2.13), so both
spellings are looked up here, once. Asynchronous collectives are in ``platform/wire.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.failures import naming

_DEVICE_OF_BACKEND = {"nccl": "cuda", "hccl": "npu"}


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks of one mesh axis that this rank belongs to.

    Attributes:
        axis: Name of the axis.
        size: Ranks on it.
        index: This rank's place on it.
        group: The process group; None for an axis of one rank, where no collective runs.
        channel: What messages on the CPU are about, 0 to ``direct.NUM_CHANNELS`` - 1. A rank that waits for those of
            one channel does not take another's for them, though they come first and are as long.
    """

    axis: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    channel: int = 0

    @classmethod
    def from_group(cls, axis: str, group: dist.ProcessGroup) -> "AxisGroup":
        """The axis that a process group stands for.

        Args:
            axis: Name of the axis.
            group: A process group that contains this rank.

        Returns:
            The axis.
        """
        return cls(axis, dist.get_world_size(group), dist.get_rank(group), group)

    @classmethod
    def single(cls, axis: str) -> "AxisGroup":
        """An axis of one rank.

        Args:
            axis: Name of the axis.

        Returns:
            The axis; it needs no initialised process group.
        """
        return cls(axis, 1, 0, None)


def all_gather_function() -> Callable[..., dist.Work | None]:
    """The all-gather into one tensor, under the name that this torch does not warn for.

    Returns:
        ``all_gather_single`` where torch has it, ``all_gather_into_tensor`` otherwise.
    """
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_function() -> Callable[..., dist.Work | None]:
    """The reduce-scatter from one tensor, under the name that this torch does not warn for.

    Returns:
        ``reduce_scatter_single`` where torch has it, ``reduce_scatter_tensor`` otherwise.
    """
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_device(axis: AxisGroup) -> torch.device:
    """Where a tensor must be that the ranks of an axis reduce.

    For ranks that hold no parameter or gradient, and so have no tensor to take a device from: NCCL
    and HCCL refuse a CPU tensor, and the other ranks would wait.

    Args:
        axis: The axis.

    Returns:
        The current device of the backend's kind; the CPU for gloo, and without a group.
    """
    kind = _DEVICE_OF_BACKEND.get(str(dist.get_backend(axis.group))) if axis.group is not None else None
    return torch.device("cpu") if kind is None else torch.device(kind, getattr(torch, kind).current_device())


def all_gather(output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> None:
    """Gather equally long buffers.

    Args:
        output: ``(size * n,)``, receives the ranks' buffers in axis order; every rank holds it.
        source: ``(n,)``, contiguous.
        axis: Ranks that take part; all of them must call.
    """
    assert output.numel() == axis.size * source.numel(), (output.shape, source.shape, axis)
    if axis.group is None:
        output.copy_(source)
        return
    with naming("all-gather over {}", axis.axis):
        all_gather_function()(output, source, group=axis.group)


def all_reduce_max(tensor: torch.Tensor, axis: AxisGroup) -> None:
    """Elementwise maximum over the axis, in place; every rank holds the result.

    Args:
        tensor: Contiguous; integer or floating point.
        axis: Ranks that take part; all of them must call.
    """
    if axis.group is not None:
        with naming("maximum over {}", axis.axis):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)


def all_reduce_sum(tensor: torch.Tensor, axis: AxisGroup) -> None:
    """Sum over the axis, in place; every rank holds the result.

    Args:
        tensor: Contiguous.
        axis: Ranks that take part; all of them must call.
    """
    if axis.group is not None:
        with naming("sum over {}", axis.axis):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group)


def sum_over_ranks(tensor: torch.Tensor, what: str) -> None:
    """Sum over all ranks of the job, in place; every rank holds the result.

    Args:
        tensor: Contiguous; on the backend's device.
        what: What is summed, for the message of a failure.
    """
    with naming(f"sum of {what} over {{}}"):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def gathered_objects(own: Any, what: str, axis: AxisGroup | None = None) -> list[Any]:
    """What each rank has, as Python objects. Slow: at start, or when something is wrong. The host waits.

    Args:
        own: This rank's; pickled.
        what: What it is, for the message of a failure.
        axis: Ranks that take part; all of them must call. None: all ranks of the job.

    Returns:
        In axis order.

    Raises:
        RuntimeError: If another rank ended, saying what was exchanged.
    """
    group, name = (dist.group.WORLD, "all ranks") if axis is None else (axis.group, axis.axis)
    if group is None:
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    with naming(f"exchange of {what} over {{}}", name):
        dist.all_gather_object(found, own, group=group)
    return found
