"""What this machine can do: its name, and its measured product and copy rates."""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hp_muon_plugin.bench.timing import interleave

_BUDGET_S = 2.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured roofs.

    Attributes:
        matmul: Floating-point operations per second of a large float32 product.
        matmul_bf16: The same in bfloat16.
        copy: Bytes per second of a large copy, read and written bytes together.
    """

    matmul: float
    matmul_bf16: float
    copy: float

    def floor_s(self, flops: float, nbytes: float) -> float:
        """Least time for some work, whatever the algorithm.

        Args:
            flops: Operations that cannot be avoided.
            nbytes: Bytes that must be read or written.

        Returns:
            Seconds: the longer of both.
        """
        return max(flops / self.matmul, nbytes / self.copy)


def measure_rates(device: torch.device, *, budget_s: float = _BUDGET_S) -> dict[str, Rates]:
    """Measure the roofs with the number of threads that is set, once for both clocks.

    Args:
        device: Where.
        budget_s: About how long to measure. A processor without bfloat16 products takes longer for its few rounds.

    Returns:
        The rates by ``cpu`` and ``wall`` clock.
    """
    side = 1024 if device.type == "cpu" else 8192
    numel = 1 << 25 if device.type == "cpu" else 1 << 28
    a, b, c = (torch.randn(side, side, device=device) for _ in range(3))
    a16, b16, c16 = (t.bfloat16() for t in (a, b, c))
    source, target = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    times = interleave(
        {
            "matmul": lambda: torch.mm(a, b, out=c),
            "matmul_bf16": lambda: torch.mm(a16, b16, out=c16),
            "copy": lambda: target.copy_(source),
        },
        device=device,
        budget_s=budget_s,
    )
    work = {"matmul": 2.0 * side**3, "matmul_bf16": 2.0 * side**3, "copy": 8.0 * numel}
    return {
        clock: Rates(**{name: work[name] / times[name].median(clock) for name in work}) for clock in ("cpu", "wall")
    }


def describe(device: torch.device) -> dict[str, object]:
    """What a reader needs to judge figures from here.

    Args:
        device: Where contenders run.

    Returns:
        Names and versions, ready for JSON.
    """
    name = _cpu_name() if device.type == "cpu" else torch.get_device_module(device.type).get_device_name()
    return {
        "device": device.type,
        "name": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",  # type: ignore[no-untyped-call]
    }


def rates_for_json(rates: Rates) -> dict[str, float]:
    """Rates in GFLOP/s and GB/s.

    Args:
        rates: Measured.

    Returns:
        Numbers by name.
    """
    return {name: round(value / 1e9, 1) for name, value in asdict(rates).items()}


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
