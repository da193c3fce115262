"""``hp-muon bench convert``: conversions beside a plain copy of the same files, and torch's own converter."""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hp_muon_plugin.bench.made_up import gpt
from hp_muon_plugin.bench.report import Row
from hp_muon_plugin.bench.timing import Times, paired_ratio
from hp_muon_plugin.checkpoint import convert, formats
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.convert import BUDGET
from hp_muon_plugin.checkpoint.progress import Progress
from hp_muon_plugin.checkpoint.syncing import sync_file
from hp_muon_plugin.errors import ConfigError

OURS, COPY, SYNCED, TORCH = "ours", "cp", "cp and sync", "dcp_to_torch_save"
CASES = ("hp-torch_dist", "torch_dist-hp", "torch_dist-torch", "torch-torch_dist", "torch_dist-fsdp_dtensor")
_LEAST, _MOST = 3, 25
_JOBS = 2  # as hp-muon ckpt convert


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion.

    Attributes:
        source: Format that is read.
        to: Format that is written.
    """

    source: str
    to: str

    def __str__(self) -> str:
        return f"{self.source}-{self.to}"


@dataclass(slots=True)
class _Stages(Progress):
    """When each stage of a conversion began, by the clock, and how long each took."""

    began: list[tuple[str, float]] = field(default_factory=list)
    taken: dict[str, list[float]] = field(default_factory=dict)

    def begin(self, what: str, total: int) -> None:
        self.began.append((what, time.perf_counter()))

    def end(self) -> None:
        ends = [when for _, when in self.began[1:]] + [time.perf_counter()]
        for (what, when), end in zip(self.began, ends, strict=True):
            self.taken.setdefault(what, []).append(end - when)
        self.began.clear()


def parse_case(text: str) -> Case:
    """A case by its name.

    Args:
        text: ``FROM-TO``, two formats.

    Raises:
        ConfigError: If it is none.
    """
    source, _, to = text.partition("-")
    known = [name for name in formats.FORMATS if name != "hf"]
    if source not in known or to not in known:
        raise ConfigError("--only", text, "is no conversion", f"write FROM-TO with two of {', '.join(known)}")
    return Case(source, to)


def measure(case: Case, mib: int, folder: Path, *, budget_s: float) -> Row:
    """Convert, copy, and have torch convert, in turn.

    Every round begins with the files of the source in the page cache, and with the output of the one before removed:
    fresh pages for what is written are then at hand for all alike.

    Args:
        case: The conversion.
        mib: MiB of the checkpoint, about.
        folder: Where files may be written; 3 times as much must fit.
        budget_s: About how long to go on, seconds.

    Returns:
        The row, by wall clock.
    """
    source, out = folder / f"{case.source}", folder / "out"
    if not source.exists():
        _make(case.source, mib, source)
    nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    stages = _Stages()
    contenders: dict[str, Callable[[], object]] = {
        OURS: lambda: _ours(case, source, out, stages),
        COPY: lambda: _copy(source, out),
        SYNCED: lambda: _copy_and_sync(source, out),
    }
    failed = {}
    metadata = next(source.rglob(".metadata"), None)
    if metadata is not None:
        try:
            _by_torch(metadata.parent, out)
            contenders[TORCH] = lambda: _by_torch(metadata.parent, out)
        except Exception as error:  # noqa: BLE001  # a peer may fail in any way; it is told
            failed[f"{TORCH} failed"] = f"{type(error).__name__}: {error}"[:200]
    times = _in_turn(contenders, out, budget_s)
    ratios = {name: paired_ratio(found, times[OURS], "wall") for name, found in times.items() if name != OURS}
    rate = nbytes / times[OURS].median("wall") / 2**30
    notes = {
        "bytes": nbytes,
        "tensors": len(gpt(mib).tensors()),
        "rounds": len(times[OURS].wall),
        "GiB/s": f"{rate:.2f}",
        "of the rate of cp": f"{ratios[COPY]:.2f}",
        "of the rate of cp and sync": f"{ratios[SYNCED]:.2f}",
        **{f"s to {what}": f"{statistics.median(taken):.3f}" for what, taken in stages.taken.items()},
        **failed,
    }
    return Row(
        case=f"{case} {nbytes / 2**20:.0f}MiB",
        threads=_JOBS,
        clock="wall",
        ours=1e3 * times[OURS].median("wall"),
        peers={name: 1e3 * found.median("wall") for name, found in times.items() if name != OURS},
        ratio=min(ratios.values()),
        floor=1e3 * times[COPY].median("wall"),
        right_ratio=ratios.get(TORCH),
        ratios=ratios,
        notes=notes,
    )


def _in_turn(contenders: dict[str, Callable[[], object]], out: Path, budget_s: float) -> dict[str, Times]:
    names = list(contenders)
    found = {name: Times([], []) for name in names}
    began, number = time.perf_counter(), -1  # the first round warms up
    while number < _LEAST or (number < _MOST and time.perf_counter() - began < budget_s):
        shift = max(0, number) % len(names)
        for name in names[shift:] + names[:shift]:
            _remove(out)
            os.sync()
            cpu, wall = time.process_time(), time.perf_counter()
            contenders[name]()
            taken = time.process_time() - cpu, time.perf_counter() - wall
            if number >= 0:
                found[name].cpu.append(taken[0])
                found[name].wall.append(taken[1])
        number += 1
    _remove(out)
    return found


def _make(name: str, mib: int, folder: Path) -> None:
    convert.convert(convert.plan(gpt(mib), name, Target()), folder, drop=True)


def _ours(case: Case, source: Path, out: Path, stages: _Stages) -> None:
    opened = formats.open_checkpoint(source, case.source)
    try:
        plan = convert.plan(opened, case.to, Target())
        convert.convert(plan, out, jobs=_JOBS, budget=BUDGET, drop=True, progress=stages)
    finally:
        opened.close()
    stages.end()


def _copy(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)


def _copy_and_sync(source: Path, out: Path) -> None:
    _copy(source, out)
    for path in out.rglob("*"):
        if path.is_file():
            sync_file(path)


def _by_torch(source: Path, out: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out.mkdir(exist_ok=True)
    dcp_to_torch_save(source, out / "model.pt")


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
