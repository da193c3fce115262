"""What the engine and the optimizer ask of a network; :mod:`hp_muon_plugin.platform.wire` does it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.direct import Expected
from hp_muon_plugin.platform.kinds import Collective

__all__ = ["Collective", "Expected", "Handle", "Wire"]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what follows behind the collective: the host on CPU, the current stream elsewhere.

        May be called again, and then does nothing.
        """


class Wire(Protocol):
    """What the engine needs of a network. All ranks of an axis issue the same calls in the same order."""

    def expect(self, kind: Collective, tensor: torch.Tensor, axis: AxisGroup, *, owner_index: int) -> Expected | None:
        """Announce a call that this rank will issue later, so that what it receives is not held up.

        All ranks of the axis announce the same calls in the same order. Only messages on the CPU gain by it.

        Args:
            kind: ``reduce`` or ``broadcast``.
            tensor: What the call will be given, or a buffer like it; a broadcast writes to it from now on
                where this rank is not the owner, a sum does not touch it.
            axis: Ranks that take part; all of them must call.
            owner_index: The owner's place on the axis.

        Returns:
            What the call is to be given as ``expected``; None if that makes no difference.
        """

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """Start to gather equally long buffers.

        Args:
            output: ``(size * n,)``, receives the buffers in axis order; every rank holds the result.
            source: ``(n,)``; may be this rank's own slice of ``output``, and nothing else of it.
            axis: Ranks that take part; all of them must call.

        Returns:
            The handle. Neither buffer may be touched before its ``wait()``.
        """

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, axis: AxisGroup) -> Handle:
        """Start to sum buffers and to leave each rank with its own slice.

        Args:
            output: ``(n,)``, receives the sum of all ranks' slices at this rank's place.
            source: ``(size * n,)``; destroyed. Overlaps ``output`` nowhere.
            axis: Ranks that take part; all of them must call.

        Returns:
            The handle. Neither buffer may be touched before its ``wait()``.
        """

    def all_reduce(self, tensor: torch.Tensor, axis: AxisGroup) -> Handle:
        """Start to sum in place; every rank holds the result.

        Args:
            tensor: ``(n,)``.
            axis: Ranks that take part; all of them must call.

        Returns:
            The handle. The buffer may not be touched before its ``wait()``.
        """

    def reduce(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """Start to sum in place on one rank.

        Args:
            tensor: ``(n,)``; holds the sum on the owner, and nothing of use on the other ranks.
            owner_index: The owner's place on the axis.
            axis: Ranks that take part; all of them must call.
            expected: What :meth:`expect` returned for this call, if it was announced.

        Returns:
            The handle. The buffer may not be touched before its ``wait()``.
        """

    def broadcast(
        self, tensor: torch.Tensor, owner_index: int, axis: AxisGroup, *, expected: Expected | None = None
    ) -> Handle:
        """Start to copy one rank's buffer to all of them.

        Args:
            tensor: ``(n,)``; sent by the owner, overwritten on the other ranks.
            owner_index: The owner's place on the axis.
            axis: Ranks that take part; all of them must call.
            expected: What :meth:`expect` returned for this call, if it was announced.

        Returns:
            The handle. The buffer may not be touched before its ``wait()``.
        """

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, received: Sequence[int], sent: Sequence[int], axis: AxisGroup
    ) -> Handle:
        """Start to send each rank its own stretch of a buffer.

        Args:
            output: ``(sum(received),)``, receives the stretches in axis order.
            source: ``(sum(sent),)``, stretches in axis order. Overlaps ``output`` nowhere.
            received: Elements from each rank; what that rank sends here.
            sent: Elements to each rank; any of them may be 0.
            axis: Ranks that take part; all of them must call, also those that send and receive nothing.

        Returns:
            The handle. Neither buffer may be touched before its ``wait()``.
        """
