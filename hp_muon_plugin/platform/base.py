"""What the plugin asks of a device, and the choice of one."""

import importlib
import importlib.util
import os
import resource
from typing import Any, Protocol

import torch

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.errors import PlatformError
from hp_muon_plugin.platform import mindspeed


class Platform(Protocol):
    """One kind of device.

    Attributes:
        name: ``cpu``, ``cuda`` or ``npu``.
        backend: Backend of torch.distributed.
    """

    name: PlatformName
    backend: str

    def prepare(self, local_rank: int) -> None:
        """Make this process use its device. Called once, before Megatron is imported."""

    def device(self) -> torch.device:
        """The device of this rank's tensors."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def memory_bytes(self) -> int:
        """Most bytes that this rank has used so far: resident set on CPU, allocator peak elsewhere."""


class CpuPlatform:
    """CPU over gloo, with ``torch.cuda`` stood in for so that megatron-core runs unmodified."""

    name = PlatformName.cpu
    backend = "gloo"

    def prepare(self, local_rank: int) -> None:
        """Activate the stand-in."""
        from hp_muon_plugin.platform import standin

        standin.activate()

    def device(self) -> torch.device:
        """``cpu``."""
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def memory_bytes(self) -> int:
        """Peak resident set of this process."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class CudaPlatform:
    """NVIDIA GPUs over NCCL."""

    name = PlatformName.cuda
    backend = "nccl"

    def prepare(self, local_rank: int) -> None:
        """Choose the GPU."""
        _refuse_crowd(self.name, torch.cuda.device_count(), local_rank)
        torch.cuda.set_device(local_rank)

    def device(self) -> torch.device:
        """The chosen GPU."""
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize()

    def memory_bytes(self) -> int:
        """Peak of torch's allocator."""
        return torch.cuda.max_memory_allocated()


def _refuse_crowd(name: PlatformName, num_devices: int, local_rank: int) -> None:
    """Every rank of the machine says so, and not only those that come too late for a device."""
    num_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    if num_ranks > num_devices:
        raise PlatformError(
            f"platform={name}: {num_ranks} ranks on this machine and {num_devices} devices; each rank needs its own\n"
            f"  fix: start {num_devices} ranks here (topology.ranks={num_devices}), or take platform=cpu"
        )


def _npu() -> Any:
    """``torch.npu``, which exists once torch_npu is imported."""
    return importlib.import_module("torch_npu").npu


class NpuPlatform:
    """Ascend NPUs over HCCL, through torch_npu. Not run on hardware by this project yet.

    megatron-core on NPU needs MindSpeed's adaptor, which patches Megatron when it is imported: next, by whoever
    trains, for it reads the trainer's arguments (platform/mindspeed.py). Without MindSpeed torch_npu's own
    ``transfer_to_npu`` translates ``torch.cuda`` calls.
    """

    name = PlatformName.npu
    backend = "hccl"

    def prepare(self, local_rank: int) -> None:
        """Import torch_npu, have it translate ``torch.cuda`` where MindSpeed will not, and choose the NPU."""
        importlib.import_module("torch_npu")
        if not mindspeed.is_installed():
            importlib.import_module("torch_npu.contrib.transfer_to_npu")
        _refuse_crowd(self.name, _npu().device_count(), local_rank)
        _npu().set_device(local_rank)

    def device(self) -> torch.device:
        """The chosen NPU."""
        return torch.device("npu", _npu().current_device())

    def synchronize(self) -> None:
        """Wait for all streams of the NPU."""
        _npu().synchronize()

    def memory_bytes(self) -> int:
        """Peak of torch_npu's allocator."""
        return int(_npu().max_memory_allocated())


_PLATFORMS: dict[PlatformName, type[CpuPlatform] | type[CudaPlatform] | type[NpuPlatform]] = {
    PlatformName.cpu: CpuPlatform,
    PlatformName.cuda: CudaPlatform,
    PlatformName.npu: NpuPlatform,
}


def available(name: PlatformName) -> bool:
    """Whether this machine has such a device.

    Args:
        name: A platform; not ``auto``.

    Returns:
        True for ``cpu``; for the others whether torch sees a device.
    """
    if name is PlatformName.cpu:
        return True
    if name is PlatformName.npu and importlib.util.find_spec("torch_npu") is None:
        return False
    if name is PlatformName.npu and not hasattr(torch, "npu"):
        importlib.import_module("torch_npu")
    module = getattr(torch, name, None)
    return bool(module is not None and module.is_available())


def choose(name: PlatformName) -> Platform:
    """The platform to use.

    Args:
        name: ``auto`` takes npu, then cuda, then cpu.

    Returns:
        The platform, not yet prepared.

    Raises:
        PlatformError: If the named platform has no device here.
    """
    if name is PlatformName.auto:
        name = next(p for p in (PlatformName.npu, PlatformName.cuda, PlatformName.cpu) if available(p))
    if not available(name):
        raise PlatformError(
            f"platform={name}: torch sees no such device on this machine\n"
            "  fix: take platform=auto or platform=cpu, or install the driver and the torch build for it"
        )
    return _PLATFORMS[name]()
