"""Messages between the ranks of an axis on the CPU, all under way at once.

gloo runs collectives on two threads of a group. Where both wait for a slow link's incoming bytes, no
later collective begins to send, and the outgoing direction idles. Messages have no such queue: each is
handed to the connection when it is issued, and they take no thread.

gloo sends a message once its receiver has told that it waits for it, and tells so on the connection
that also carries what the receiver itself sends. Behind megabytes for a slow link that takes as long as
they do, so that receivers tell early where they can (:class:`Expected`).
"""

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.failures import NotBegun

Started = dist.Work | NotBegun | None
_TAG = 0x6D75  # of channel 0: messages of one tag arrive in the order in which they were sent
_FIRST_EARLY_TAG, _NUM_EARLY_TAGS = 1 << 24, 1 << 24
NUM_CHANNELS = _FIRST_EARLY_TAG - _TAG
_early_tags: "weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Expected:
    """A message that is announced before it is sent.

    Attributes:
        tag: Of this message alone.
        arriving: By place, what receives what comes from there.
        works: The receives under way.
        scratch: What ``arriving`` lies in, if it is to be given back.
    """

    tag: int
    arriving: dict[int, torch.Tensor] = field(default_factory=dict)
    works: list[Started] = field(default_factory=list)
    scratch: torch.Tensor | None = None


def expect(group: dist.ProcessGroup, arriving: dict[int, torch.Tensor], scratch: torch.Tensor | None) -> Expected:
    """Begin to receive what other ranks will send; all ranks of the group call alike, also those that will send.

    Args:
        group: Theirs.
        arriving: By place, what receives what comes from there.
        scratch: See :class:`Expected`.

    Returns:
        What the message goes by.
    """
    tags = _early_tags.setdefault(group, itertools.count())
    tag = _FIRST_EARLY_TAG + next(tags) % _NUM_EARLY_TAGS
    return Expected(tag, arriving, _begun(group, {}, arriving, tag), scratch)


def _begun(
    group: dist.ProcessGroup, leaving: Mapping[int, torch.Tensor], arriving: Mapping[int, torch.Tensor], tag: int
) -> list[Started]:
    """Messages under way, or in their place why one of them could not be begun: its peer has ended."""
    try:
        received: list[Started] = [group.recv([tensor], place, tag) for place, tensor in arriving.items()]
        return received + [group.send([tensor], place, tag) for place, tensor in leaving.items()]
    except RuntimeError as error:
        return [NotBegun(error)]


def others(axis: AxisGroup) -> list[int]:
    """Places of the other ranks of an axis, beginning behind this one so that no rank is everybody's first.

    Args:
        axis: The axis.

    Returns:
        ``size - 1`` places.
    """
    return [(axis.index + step) % axis.size for step in range(1, axis.size)]


def exchange(
    group: dist.ProcessGroup,
    leaving: Mapping[int, torch.Tensor],
    arriving: Mapping[int, torch.Tensor],
    *,
    expected: Expected | None = None,
    channel: int = 0,
) -> list[Started]:
    """Begin to send to and to receive from other ranks.

    Args:
        group: Theirs; all of them issue their messages of a channel in the same order.
        leaving: By place, what is sent there.
        arriving: By place, what receives what comes from there.
        expected: Their announcement, if there was one: then what arrives is under way.
        channel: See :class:`AxisGroup`.

    Returns:
        What to wait for.
    """
    if expected is not None:
        return expected.works + _begun(group, leaving, {}, expected.tag)
    return _begun(group, leaving, arriving, _TAG + channel % NUM_CHANNELS)


def gather(output: torch.Tensor, source: torch.Tensor, axis: AxisGroup, group: dist.ProcessGroup) -> list[Started]:
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
    arriving = {place: slices[place] for place in places}
    return exchange(group, dict.fromkeys(places, source), arriving, channel=axis.channel)


def broadcast(
    tensor: torch.Tensor,
    owner_index: int,
    axis: AxisGroup,
    group: dist.ProcessGroup,
    *,
    expected: Expected | None = None,
) -> list[Started]:
    """Begin to copy one rank's buffer to all of them.

    Args:
        tensor: ``(n,)``; sent by the owner, overwritten on the other ranks.
        owner_index: The owner's place on the axis.
        axis: Ranks that take part; all of them call.
        group: Theirs.
        expected: Its announcement, if there was one.

    Returns:
        What to wait for.
    """
    # all of tensor arrives at each rank but the owner, from there: owners take turns, so that links are used evenly
    is_owner = axis.index == owner_index
    leaving = dict.fromkeys(others(axis), tensor) if is_owner else {}
    return exchange(group, leaving, {} if is_owner else {owner_index: tensor}, expected=expected)
