"""A wire that counts: collectives and bytes, by kind and axis."""

import dataclasses
from collections.abc import Sequence

import torch

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.protocol import Collective, Expected, Handle, Wire


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What one kind of collective moved on one axis.

    Attributes:
        num_collectives: Calls that reached the network.
        num_bytes: Sum of the whole buffers, ``size * n`` elements for all-gather and reduce-scatter.
            What leaves a rank follows from it: ``(size - 1) / size`` of it, twice that for all-reduce.
            Of an all-to-all, what this rank sends to the others.
    """

    num_collectives: int = 0
    num_bytes: int = 0


class CountingWire:
    """Passes calls on and counts them. Axes of one rank and empty buffers reach no network, and do not count.

    Args:
        wire: What does the work.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._traffic: dict[tuple[Collective, str], Traffic] = {}

    def of(self, kind: Collective, axis: str) -> Traffic:
        """What was counted since the last :meth:`reset`.

        Args:
            kind: The collective.
            axis: Name of the axis.

        Returns:
            The count; zeros if there was none.
        """
        return self._traffic.get((kind, axis), Traffic())

    def counts(self) -> dict[tuple[Collective, str], Traffic]:
        """All counts that are not zero.

        Returns:
            A copy, by kind and axis name.
        """
        return dict(self._traffic)

    def reset(self) -> None:
        """Start again from zero."""
        self._traffic.clear()

    def expect(self, kind: Collective, tensor: torch.Tensor, axis: AxisGroup, *, owner_index: int) -> Expected | None:
        """See :meth:`Wire.expect`. The call itself counts, not its announcement."""
        return self._wire.expect(kind, tensor, axis, owner_index=owner_index)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_gather`."""
        self._count(Collective.ALL_GATHER, output, axis)
        return self._wire.all_gather(output, source, axis)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.reduce_scatter`."""
        self._count(Collective.REDUCE_SCATTER, source, axis)
        return self._wire.reduce_scatter(output, source, axis)

    def all_reduce(self, tensor: torch.Tensor, axis: AxisGroup) -> Handle:
        """See :meth:`Wire.all_reduce`."""
        self._count(Collective.ALL_REDUCE, tensor, axis)
        return self._wire.all_reduce(tensor, axis)

    def reduce(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.reduce`."""
        self._count(Collective.REDUCE, tensor, axis)
        return self._wire.reduce(tensor, owner_index, axis, expected=expected)

    def broadcast(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """See :meth:`Wire.broadcast`."""
        self._count(Collective.BROADCAST, tensor, axis)
        return self._wire.broadcast(tensor, owner_index, axis, expected=expected)

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int], axis: AxisGroup
    ) -> Handle:
        """See :meth:`Wire.all_to_all`. A call counts also where this rank sends nothing: others may."""
        if axis.group is not None:
            elsewhere = (source.numel() - sent[axis.index]) * source.element_size()
            self._add(Collective.ALL_TO_ALL, axis, elsewhere)
        return self._wire.all_to_all(output, source, received, sent, axis)

    def _count(self, kind: Collective, whole: torch.Tensor, axis: AxisGroup) -> None:
        if axis.group is None or whole.numel() == 0:
            return
        self._add(kind, axis, whole.numel() * whole.element_size())

    def _add(self, kind: Collective, axis: AxisGroup, num_bytes: int) -> None:
        old = self.of(kind, axis.axis)
        self._traffic[kind, axis.axis] = Traffic(old.num_collectives + 1, old.num_bytes + num_bytes)
