"""Messages between the ranks of an axis on the CPU, all under way at once.

gloo runs collectives on two threads of a group. Where both wait for a slow link's incoming bytes, no
later collective begins to send, and the outgoing direction idles. Messages have no such queue: each is
handed to the connection when it is issued, and they take no thread.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.collectives import AxisGroup

_TAG = 0x6D75  # messages of one pair of ranks arrive in the order in which they were sent, so that one is enough


def others(axis: AxisGroup) -> list[int]:
    """Places of the other ranks of an axis, beginning behind this one so that no rank is everybody's first.

    Args:
        axis: The axis.

    Returns:
        ``size - 1`` places.
    """
    return [(axis.index + step) % axis.size for step in range(1, axis.size)]


def exchange(
    group: dist.ProcessGroup, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor]
) -> list[dist.Work | None]:
    """Begin to send to and to receive from other ranks.

    Args:
        group: Theirs; all of them issue their messages in the same order.
        leaving: By place, what is sent there.
        arriving: By place, what receives what comes from there.

    Returns:
        What to wait for.
    """
    received: list[dist.Work | None] = [group.recv([tensor], place, _TAG) for place, tensor in arriving.items()]
    return received + [group.send([tensor], place, _TAG) for place, tensor in leaving.items()]


def gather(
    output: torch.Tensor, source: torch.Tensor, axis: AxisGroup, group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Begin to gather equally long buffers; this rank's own is not copied.

    Args:
        output: ``(size * n,)``, receives the others' buffers in axis order.
        source: ``(n,)``, this rank's.
        axis: Ranks that take part; all of them call.
        group: Theirs.

    Returns:
        What to wait for.
    """
    slices, places = output.view(axis.size, source.numel()), others(axis)
    # (size - 1) / size of output arrives on each rank
    return exchange(group, dict.fromkeys(places, source), {place: slices[place] for place in places})


def broadcast(
    tensor: torch.Tensor, owner_index: int, axis: AxisGroup, group: dist.ProcessGroup
) -> list[dist.Work | None]:
    """Begin to copy one rank's buffer to all of them.

    Args:
        tensor: ``(n,)``; sent by the owner, overwritten on the other ranks.
        owner_index: The owner's place on the axis.
        axis: Ranks that take part; all of them call.
        group: Theirs.

    Returns:
        What to wait for.
    """
    # all of tensor arrives at each rank but the owner, from there: owners take turns, so that links are used evenly
    is_owner = axis.index == owner_index
    leaving = dict.fromkeys(others(axis), tensor) if is_owner else {}
    return exchange(group, leaving, {} if is_owner else {owner_index: tensor})
