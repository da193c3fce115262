"""Memory on the CPU for what collectives receive before it is summed."""

import torch


class Scratch:
    """CPU buffers that come back: several may be out at once, and a smaller one may be the start of a larger."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Take a buffer.

        Args:
            numel: Elements.
            dtype: Their type.

        Returns:
            ``(numel,)``, on the CPU; whatever was in it before.
        """
        fitting = [free for free in self._free if free.dtype is dtype and free.numel() >= numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype)
        found = min(fitting, key=torch.Tensor.numel)
        self._free = [free for free in self._free if free is not found]
        return found if found.numel() == numel else found[:numel]

    def give(self, tensor: torch.Tensor) -> None:
        """Give a buffer back.

        Args:
            tensor: What :meth:`take` gave; nobody may use it any more.
        """
        self._free.append(tensor if tensor._base is None else tensor._base)
