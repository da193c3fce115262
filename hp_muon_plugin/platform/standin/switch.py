"""Turning the stand-in on and off."""

import torch

from hp_muon_plugin.errors import PlatformError
from hp_muon_plugin.platform.patching import Patcher, Replacement
from hp_muon_plugin.platform.standin.devices import CudaMeansCpu
from hp_muon_plugin.platform.standin.torch_cuda import replacements

_patcher = Patcher()
_modes: list[CudaMeansCpu] = []


def activate() -> None:
    """Let ``torch.cuda`` mean the CPU in this process. Calling it again changes nothing.

    Device names are translated on the calling thread and in processes forked from it.

    Raises:
        PlatformError: If this machine has a CUDA or NPU device.
    """
    if is_active():
        return
    present = [name for name in ("cuda", "npu") if _has_device(name)]
    if present:
        raise PlatformError(
            f"platform=cpu: this machine has a {present[0]} device, and the torch.cuda stand-in would hide it\n"
            f"  fix: take platform={present[0]}, or hide the device with an empty "
            "CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES"
        )
    _patcher.apply(replacements(), aliases_in="megatron")
    mode = CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _modes.append(mode)


def deactivate() -> None:
    """Give ``torch.cuda`` back, bit for bit. Calling it again changes nothing."""
    if not is_active():
        return
    _modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _patcher.restore()


def is_active() -> bool:
    """Whether the stand-in is on in this process."""
    return bool(_modes)


def replaced() -> tuple[Replacement, ...]:
    """What is replaced now, with the reason for each."""
    return _patcher.applied


def _has_device(name: str) -> bool:
    module = getattr(torch, name, None)
    return bool(module is not None and module.is_available())
