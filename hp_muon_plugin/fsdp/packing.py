"""The copies that the per-parameter layout needs around every collective. The flat layout needs none."""

import torch

from hp_muon_plugin.layout.per_param import PerParamLayout
from hp_muon_plugin.platform.wire import Handle


class Packing:
    """Between whole parameters one after another and what collectives see: one rank's chunks after another's.

    Args:
        layout: The layout.
    """

    def __init__(self, layout: PerParamLayout) -> None:
        self._layout = layout
        self._stages: dict[torch.dtype, torch.Tensor] = {}

    def stage(self, like: torch.Tensor) -> torch.Tensor:
        """The buffer of collectives of one type, kept for the next time.

        Args:
            like: Its type and device.

        Returns:
            ``(num_shards * shard_numel,)``.
        """
        if like.dtype not in self._stages:
            self._stages[like.dtype] = torch.zeros(self._layout.numel, dtype=like.dtype, device=like.device)
        return self._stages[like.dtype]

    def _pairs(self, flat: torch.Tensor, stage: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        size, by_rank, place, pairs = self._layout.num_shards, stage.view(self._layout.num_shards, -1), 0, []
        for chunk, placement in zip(self._layout.chunks, self._layout.placements, strict=True):
            whole = flat[placement.offset : placement.offset + size * chunk].view(size, chunk)
            pairs.append((whole, by_rank[:, place : place + chunk]))
            place += chunk
        return pairs

    def unpack(self, stage: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy chunks into whole parameters.

        Args:
            stage: What an all-gather delivered.
            flat: ``(num_shards * shard_numel,)``, receives whole parameters.
        """
        for whole, chunks in self._pairs(flat, stage):
            whole.copy_(chunks)

    def pack(self, flat: torch.Tensor, stage: torch.Tensor) -> None:
        """Copy whole gradients into chunks.

        Args:
            flat: Whole gradients, zero beyond the ends of parameters.
            stage: Receives what a reduce-scatter reads.
        """
        stage.zero_()
        for whole, chunks in self._pairs(flat, stage):
            chunks.copy_(whole)


class Unpacking:
    """An all-gather whose result is unpacked when it is waited for.

    Args:
        handle: The all-gather.
        packing: How.
        stage: What it writes.
        flat: Where whole parameters go.
    """

    def __init__(self, handle: Handle, packing: Packing, stage: torch.Tensor, flat: torch.Tensor) -> None:
        self._handle, self._packing, self._stage, self._flat = handle, packing, stage, flat
        self._is_done = False

    def wait(self) -> None:
        """See :meth:`Handle.wait`."""
        self._handle.wait()
        if not self._is_done:
            self._is_done = True
            with torch.no_grad():
                self._packing.unpack(self._stage, self._flat)
