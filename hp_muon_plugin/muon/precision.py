"""How exact a float32 matrix product really is here: TF32, HF32 and oneDNN settings.

A float32 Gram matrix under TF32 is silently one of 11 bits, and the Gram form explodes. The
iteration therefore switches such settings off while it runs, and takes their unit roundoff into
account where they cannot be.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hp_muon_plugin.muon.runs import BFLOAT16, IEEE_FLOAT32, TF32, GramPrecision


@dataclass(frozen=True, slots=True)
class Setting:
    """One switch that lowers the precision of float32 products.

    Attributes:
        owner: Object that holds it.
        name: Attribute.
        exact: Value with which products are IEEE.
        inexact: Values with which they are not.
    """

    owner: Any
    name: str
    exact: Any
    inexact: tuple[Any, ...]

    def read(self) -> Any:
        """The current value."""
        return getattr(self.owner, self.name)

    def write(self, value: Any) -> None:
        """Set it."""
        setattr(self.owner, self.name, value)

    def is_ieee(self) -> bool:
        """Whether products keep all bits."""
        return self.read() not in self.inexact


def gram_precision(device: torch.device) -> GramPrecision:
    """Precision of float32 products on a device, as the process is configured now.

    Args:
        device: The device.

    Returns:
        IEEE float32, or what TF32, HF32 or a oneDNN setting reduces it to.
    """
    if is_ieee_float32(device):
        return IEEE_FLOAT32
    return BFLOAT16 if device.type == "cpu" else TF32


def is_ieee_float32(device: torch.device) -> bool:
    """Whether float32 products on a device keep all 24 bits.

    Args:
        device: The device.

    Returns:
        False where TF32, HF32 or a reduced oneDNN precision is switched on.
    """
    return all(setting.is_ieee() for setting in settings(device))


@contextlib.contextmanager
def ieee_float32(found: Sequence[Setting]) -> Iterator[None]:
    """Float32 products keep all 24 bits inside, whatever the process is configured to.

    Args:
        found: The :func:`settings` of the device.

    Yields:
        Nothing; the configuration is restored afterwards.
    """
    changed = [setting for setting in found if not setting.is_ieee()]
    before = [setting.read() for setting in changed]
    try:
        for setting in changed:
            setting.write(setting.exact)
        yield
    finally:
        for setting, value in zip(changed, before, strict=True):
            setting.write(value)


def settings(device: torch.device) -> list[Setting]:
    """The switches of a device; each is the finest one that its torch version has.

    Args:
        device: The device.

    Returns:
        What lowers the precision of float32 products there, if set.
    """
    if device.type == "cpu":
        matmul = getattr(torch.backends.mkldnn, "matmul", None)
        if hasattr(matmul, "fp32_precision"):
            return [Setting(matmul, "fp32_precision", "ieee", ("bf16", "tf32"))]
        return []
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        if hasattr(matmul, "fp32_precision"):
            return [Setting(matmul, "fp32_precision", "ieee", ("tf32",))]
        return [Setting(matmul, "allow_tf32", False, (True,))]
    if device.type == "npu" and importlib.util.find_spec("torch_npu") is not None:
        npu = importlib.import_module("torch_npu").npu
        return [Setting(npu.matmul, "allow_hf32", False, (True,))]
    return []
