"""Memory of ``hp-muon bench optimizer``: what a case is expected to need, and what this machine has.

Contenders of a case take turns step by step, so all of them are in memory at once, on every rank.
"""

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path

from hp_muon_plugin.bench.opt_cases import Case
from hp_muon_plugin.bench.opt_convention import JUDGED_STEPS, Convention

GIB = 2**30
SHARDED, WHOLE = 2.5, 5.0
"""Whole float32 models that one contender takes of a rank: weights, gradients twice, momentum and what a step needs,
of shards; or of whole weights or updates. Measured on 4 ranks with 74x24x10240: 1.0 to 2.5, and 4.4 to 4.9."""
RANK_BYTES = 384 * 2**20
"""A rank with torch and a contender's library (200 MiB with torch alone, of which a part is shared)."""
_RESERVE = GIB  # for what else runs on the machine
_GROUP = Path("/sys/fs/cgroup")

Free = Callable[[], int | None]


def contender_bytes(case: Case, copies: float, num_ranks: int) -> int:
    """What one contender is expected to take on all ranks.

    Args:
        case: The model.
        copies: Whole models that a rank holds of it.
        num_ranks: Ranks.

    Returns:
        Bytes.
    """
    return round(4 * sum(weight.numel for weight in case.weights) * copies * num_ranks)


def reference_bytes(case: Case, conventions: Iterable[Convention]) -> int:
    """What the process that judges is expected to take: float64 directions of every step, for each way to compute them.

    Args:
        case: The model.
        conventions: Of all contenders.

    Returns:
        Bytes.
    """
    ways = {(each.rows, each.grad_share, dtype) for each in conventions for dtype in (each.dtype, "float64")}
    return RANK_BYTES + 8 * sum(weight.numel for weight in case.weights) * (JUDGED_STEPS * len(ways) + 3)


def lacking(wanted: int, free: Free) -> str | None:
    """Why something is left out, or None if there is room for it.

    Args:
        wanted: Bytes that it is expected to need.
        free: Bytes that there are; None if nobody knows.

    Returns:
        The reason.
    """
    there = free()
    if there is None or wanted + _RESERVE <= there:
        return None
    return (
        f"left out: needs about {wanted / GIB:.1f} GiB of memory, and {there / GIB:.1f} GiB are free, of which "
        f"{_RESERVE // GIB} GiB stays so; name fewer contenders with --peers and --strategies, or fewer --ranks"
    )


def free_bytes() -> int | None:
    """What this process and its children may still take: of the machine, and of their control groups.

    Returns:
        Bytes; None where the system does not tell.
    """
    found = [_meminfo(), *(_left(folder) for folder in _groups())]
    known = [value for value in found if value is not None]
    return min(known, default=None)


def return_memory() -> None:
    """Give freed memory back to the system: whole weights and gradients leave holes between what stays."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _groups() -> list[Path]:
    """Folders of this process's control groups, innermost first: of version 2, and of version 1's memory controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            top = _GROUP / controllers if controllers else _GROUP
            here = top / path.strip("/")
            found += [folder for folder in (here, *here.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return found


def _left(folder: Path) -> int | None:
    """Of a control group's limit; pages of files that can be dropped count as free."""
    for limit, usage, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(most) - used + int(stat.get(dropped, 0)) if most.isdigit() else None
    return None
