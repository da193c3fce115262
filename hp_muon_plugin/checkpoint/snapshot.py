"""Copies of a rank's chunks in host memory that is used again for the next checkpoint."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.checkpoint.parts import Part


class Snapshot:
    """Keeps one host buffer for each chunk that this rank writes."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Host memory that it holds."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def take(self, parts: Sequence[Part]) -> None:
        """Copy, and let the parts be the copies. What the device still computes is in them.

        Args:
            parts: What this rank writes; changed in place.
        """
        kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        devices = set()
        for part in parts:
            copies = {}
            for offsets, view in part.views().items():
                key = (part.name, offsets)
                buffer = self._buffers.get(key)
                if buffer is None or buffer.shape != view.shape or buffer.dtype is not view.dtype:
                    buffer = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.device.type == "cuda")
                buffer.copy_(view, non_blocking=True)
                devices.add(view.device)
                copies[offsets] = kept[key] = buffer
            part.replace(copies)
        for device in devices:
            if device.type != "cpu":
                getattr(torch, device.type).synchronize(device)  # the copies must be whole before training goes on
        self._buffers = kept
