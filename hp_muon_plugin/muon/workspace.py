"""Buffers that are taken once and used again by every step."""

import math

import torch

_ALIASING_BYTES = 512
_CACHE_LINE_BYTES = 64

_Key = tuple[str, tuple[int, ...], torch.dtype]


class Workspace:
    """Named flat buffers that grow to the largest request and are then reused.

    A buffer's contents are valid until the same name is asked for again.

    Args:
        device: Where the buffers live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        """Counts how often a buffer was replaced by a larger one; views taken before keep the old alive."""
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[_Key, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A contiguous tensor of the given shape with undefined contents.

        Args:
            name: Which buffer; two that live at the same time need two names.
            shape: Shape.
            dtype: Data type.

        Returns:
            A view of the buffer; the same object for the same request.
        """
        found = self._views.get((name, shape, dtype))
        return self._make(name, shape, dtype) if found is None else found

    def take_padded(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A stack of matrices with undefined contents whose rows do not lie a power of two apart.

        Transposing a block of rows that all map to the same few lines of the CPU's cache takes three times
        as long; so rows get a cache line of padding there.

        Args:
            name: Which buffer.
            shape: ``(B, m, n)``.
            dtype: Data type.

        Returns:
            A view of the buffer, with rows ``n`` or slightly more elements apart.
        """
        count, rows, cols = shape
        is_aliased = self.device.type == "cpu" and cols * dtype.itemsize % _ALIASING_BYTES == 0
        pad = _CACHE_LINE_BYTES // dtype.itemsize if is_aliased else 0
        whole = self.take(name, (count, rows, cols + pad), dtype)
        return whole[:, :, :cols] if pad else whole

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            self.version += buffer is not None
            buffer = self._buffers[name, dtype] = torch.empty(numel, device=self.device, dtype=dtype)
            self._views = {key: view for key, view in self._views.items() if (key[0], key[2]) != (name, dtype)}
        view = self._views[name, shape, dtype] = buffer[:numel].view(shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
