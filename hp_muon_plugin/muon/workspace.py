"""Buffers that are taken once and used again by every step."""

import torch


class Workspace:
    """Named flat buffers that grow to the largest request and are then reused.

    A buffer's contents are valid until the same name is asked for again.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A contiguous tensor of the given shape with undefined contents.

        Args:
            name: Which buffer; two that live at the same time need two names.
            shape: Shape.
            device: Device.
            dtype: Data type.

        Returns:
            A view of the buffer.
        """
        numel = 1
        for size in shape:
            numel *= size
        key = (name, device, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[key] = torch.empty(numel, device=device, dtype=dtype)
        return buffer[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
