"""Translating device arguments: ``cuda``, ``cuda:1`` and plain integers mean the CPU."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CurrentDevice(str):
    """What ``torch.cuda.current_device()`` returns: a device name that also reads as an index.

    As a device argument it is ``cpu``, also inside a backward pass, where torch switches function
    modes off; in ``f"cuda:{torch.cuda.current_device()}"`` and ``int(...)`` it is 0.
    """

    __slots__ = ()

    def __new__(cls) -> "CurrentDevice":
        """The one value."""
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return format(0, spec)

    def __int__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 0


def means_cuda(device: object) -> bool:
    """Whether a device argument names a CUDA device.

    Args:
        device: What was passed: a string, a ``torch.device``, an index, or anything else.

    Returns:
        True for CUDA names, devices and indices.
    """
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class CudaMeansCpu(TorchFunctionMode):
    """Sends every torch call that asks for a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with translated device arguments."""
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if means_cuda(arg) else arg for arg in args[1:]))
        if not kwargs:
            return func(*args)
        if means_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)
