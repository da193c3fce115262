"""Whether this machine may have an accelerator, without a word to a driver and without torch."""

import importlib.util
from importlib import metadata
from pathlib import Path

_DEVICE_FILES = (
    "nvidia*",  # NVIDIA; nvhost-*, nvmap: its boards with memory in common; dxg: Windows' subsystem for Linux
    "nvhost*",
    "nvmap",
    "dxg",
    "kfd",  # AMD, which torch calls cuda as well
    "davinci*",  # Ascend
    "accel*",
)
_BACKENDS = "torch.backends"
"""Entry points that torch loads with itself: what they start is not known."""


def signs_of_accelerator(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """What speaks for an accelerator: device files, and packages that bring one to torch.

    Args:
        devices: Where device files are.

    Returns:
        Paths and names of packages. None of them proves that a device works.
    """
    files = [str(path) for pattern in _DEVICE_FILES for path in sorted(devices.glob(pattern))]
    packages = ["torch_npu"] if importlib.util.find_spec("torch_npu") is not None else []
    return (*files, *packages, *(found.value for found in metadata.entry_points(group=_BACKENDS)))
