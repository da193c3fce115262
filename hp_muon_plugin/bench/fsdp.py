"""``hp-muon bench fsdp``: starts the ranks, and makes rows of what they found."""

import json
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hp_muon_plugin.bench.fsdp_cases import least_flops, parse_case
from hp_muon_plugin.bench.fsdp_contenders import ALONE, OURS, contenders
from hp_muon_plugin.bench.fsdp_rank import REPLICATE, Plan
from hp_muon_plugin.bench.fsdp_traffic import SLOW
from hp_muon_plugin.bench.report import Row
from hp_muon_plugin.bench.timing import Times, paired_ratio
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.train.launch import Interrupted, Stop, launch_module, reported_failure
from hp_muon_plugin.train.worker import FAILURE_EXIT, Failure

_MODULE = "hp_muon_plugin.bench.fsdp_rank"
_POLL_S = 0.1
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LIMIT, LIMIT_BF16 = 1e-3, 5e-2
"""Relative error up to which a contender is right. Sums in another order were seen to be off by 1e-6 in float32;
a wrong divisor, a lost gradient or a stale weight is off by 1e-1 or more."""


@dataclass(frozen=True, slots=True)
class Supernodes:
    """Nodes with a slow link between them.

    Attributes:
        path: Program that makes them.
        nodes: How many.
        rate: Of the link, as ``tc`` writes it, or ``none``.
    """

    path: Path
    nodes: int
    rate: str

    @property
    def bytes_per_s(self) -> float:
        """The rate as a number; 0 if there is no limit."""
        if self.rate == "none":
            return 0.0
        digits = self.rate.rstrip("kmgbit")
        unit = self.rate[len(digits) :]
        if unit not in _UNITS or not digits.isdecimal():
            raise ConfigError("--rate", self.rate, "is no rate", "write none, or such as 200mbit")
        return float(digits) * _UNITS[unit] / 8


def run_here(plan: Plan, folder: Path, *, num_ranks: int) -> Failure | None:
    """Run the ranks on this machine.

    Args:
        plan: What they measure.
        folder: An empty folder for their results.
        num_ranks: Ranks.

    Returns:
        None, or the first failure.
    """
    return launch_module(
        [_MODULE, *_arguments(plan, folder)], folder, num_ranks=num_ranks, threads=1, platform=PlatformName.cpu
    )


def run_on_testbed(
    plan: Plan, folder: Path, *, num_ranks: int, testbed: Supernodes, timeout_s: float
) -> Failure | None:
    """Run the ranks on simulated nodes.

    Args:
        plan: What they measure.
        folder: An empty folder for their results.
        num_ranks: Ranks of all nodes.
        testbed: The nodes.
        timeout_s: When to give up.

    Returns:
        None, or the first failure.
    """
    options = {
        "--nodes": testbed.nodes,
        "--ranks-per-node": num_ranks // testbed.nodes,
        "--rate": testbed.rate,
        "--timeout": timeout_s,
        "--python": sys.executable,
        "--log-dir": folder,
    }
    command = [str(testbed.path), *(str(word) for pair in options.items() for word in pair)]
    code = _run_to_the_end([*command, "--", "-m", _MODULE, *_arguments(plan, folder)])
    if code == 0:
        return None
    reported = reported_failure(folder, num_ranks=num_ranks)
    return reported or Failure(0, f"the testbed ended with exit code {code}", FAILURE_EXIT, None)


def _run_to_the_end(command: list[str]) -> int:
    """Run a program; if we are interrupted, let it take down what it has built."""
    with Stop() as stop:
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None and not stop.is_set:
            time.sleep(_POLL_S)
        if stop.is_set and process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait()
    if stop.is_set:
        raise Interrupted
    return code


def _arguments(plan: Plan, folder: Path) -> list[str]:
    path = folder / "plan.json"
    path.write_text(json.dumps(asdict(plan)), encoding="utf-8")
    return [str(path), str(folder)]


def rows(plan: Plan, folder: Path, *, num_ranks: int, testbed: Supernodes | None = None) -> list[Row]:
    """What the ranks found.

    Args:
        plan: What they measured.
        folder: Where they left it.
        num_ranks: Ranks.
        testbed: The nodes they ran on.

    Returns:
        For each case and each of our contenders, one row by CPU time and one by wall time.
    """
    made = []
    for number, text in enumerate(plan.cases):
        races = _read(folder, f"{number}.race", num_ranks)
        memory = [_read(folder, f"{number}.memory{who}", num_ranks) for who in range(len(contenders(plan.replicas)))]
        result = _Result(plan, text, num_ranks, testbed, races, memory if plan.has_memory else [])
        for ours in (name for name in contenders(plan.replicas) if name.startswith(OURS)):
            made += [result.row(ours, clock) for clock in ("wall", "cpu")]
    return made


def _read(folder: Path, name: str, num_ranks: int) -> list[Any]:
    paths = [folder / f"found{rank}.{name}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


@dataclass(frozen=True, slots=True)
class _Result:
    """One case, as all ranks found it."""

    plan: Plan
    text: str
    num_ranks: int
    testbed: Supernodes | None
    races: list[Any]
    memory: list[list[Any]]

    @property
    def names(self) -> list[str]:
        return [name for name in self.races[0]["found"] if name != ALONE]

    def times(self, name: str) -> Times:
        """The slowest rank's time of each round."""
        ranks = [race["found"][name] for race in self.races]
        return Times(*([max(step) for step in zip(*(rank[c] for rank in ranks), strict=True)] for c in ("cpu", "wall")))

    def is_right(self, name: str) -> bool:
        limit = LIMIT_BF16 if parse_case(self.text, "case").is_bf16 else LIMIT
        return bool(self.races[0]["found"][name]["error"] <= limit)

    def row(self, ours: str, clock: str) -> Row:
        times = {name: self.times(name) for name in [*self.names, ALONE]}
        peers = [name for name in self.names if not name.startswith(OURS)]
        ratios = {name: paired_ratio(times[name], times[ours], clock) for name in peers}
        right = [ratio for name, ratio in ratios.items() if self.is_right(name) and self.is_right(ours)]
        errors = {name: self.races[0]["found"][name]["error"] for name in peers}
        return Row(
            case=self._case(ours),
            threads=1,
            clock=clock,
            ours=1e3 * times[ours].median(clock),
            peers={name: 1e3 * times[name].median(clock) for name in [*peers, ALONE]},
            ratio=min(right, default=0.0),
            floor=1e3 * self._floor_s(ours, clock, times[ALONE]),
            right_ratio=min(right, default=None),
            ratios=ratios,
            errors={OURS: self.races[0]["found"][ours]["error"], **errors},
            notes=self._notes(ours, [ours, *peers]) | (self._bound(ours, times) if clock == "wall" else {}),
        )

    def _case(self, ours: str) -> str:
        shards = self.num_ranks // self.plan.replicas
        mesh = f"{self.plan.replicas}x{shards}" if self.plan.replicas > 1 else f"{shards} ranks"
        rate = f" at {self.testbed.rate}" if self.testbed else ""
        return f"{self.text} {mesh}{ours.removeprefix(OURS)}{rate}"

    def _floor_s(self, ours: str, clock: str, alone: Times) -> float:
        """The longer of computing alone, and of sending what must be sent."""
        link = statistics.median(race["link"][("cpu", "wall").index(clock)] for race in self.races)
        fast = self._least_bytes(ours, is_outer=False) / link if link else 0.0
        slow = self._least_bytes(ours, is_outer=True) / link if link else 0.0
        if self.testbed is not None and clock == "wall" and self.testbed.bytes_per_s:
            fast, slow = 0.0, min(self._sent(name, SLOW) for name in self.names) / self.testbed.bytes_per_s
        return max(alone.median(clock), fast + slow)

    def _bound(self, ours: str, times: dict[str, Times]) -> dict[str, Any]:
        """What a step over a limited link takes at least, and how far ours is from it."""
        if self.testbed is None or not self.testbed.bytes_per_s:
            return {}
        alone, least = 1e3 * times[ALONE].median("wall"), min(self._sent(name, SLOW) for name in self.names)
        slow = 1e3 * least / self.testbed.bytes_per_s
        ratio = 1e3 * times[ours].median("wall") / max(alone, slow)
        told = f"{ratio:.2f} x max(compute alone {alone:.4g} ms, slow-link bytes / rate {slow:.4g} ms)"
        return {"bound": told}

    def _least_bytes(self, ours: str, *, is_outer: bool) -> float:
        """Bytes that leave a rank for the collectives of one step of ours, by the best algorithm."""
        total = 0.0
        for key, (_, num_bytes) in self.races[0]["found"][ours]["counted"].items():
            kind, axis = key.split(" ")
            if (axis == REPLICATE) is is_outer:
                size = self.plan.replicas if is_outer else self.num_ranks // self.plan.replicas
                total += num_bytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        return total

    def _sent(self, name: str, interface: str) -> float:
        """Bytes per step that left the busiest node."""
        counts = [race["found"][name]["sent"].get(interface) for race in self.races]
        return max((statistics.median(count) for count in counts if count), default=0.0)

    def _notes(self, ours: str, names: list[str]) -> dict[str, Any]:
        notes: dict[str, Any] = {"rounds": len(self.times(ours).wall)}
        wrong = [name for name in names if not self.is_right(name)]
        if wrong:
            notes["WRONG"] = ", ".join(wrong)
        for who, name in enumerate(contenders(self.plan.replicas)):
            if self.memory and name in names:
                notes[f"peak MiB of {name}"] = max(rank["peak"] for rank in self.memory[who])
        notes["collectives of ours"] = _told(self.races[0]["found"][ours]["counted"])
        for name in names:
            notes[f"c10d calls of {name}"] = _told(self.races[0]["found"][name]["calls"])
            if self.testbed is not None:
                notes[f"slow-link MB of {name}"] = round(self._sent(name, SLOW) / 1e6, 3)
        gflop = least_flops(parse_case(self.text, "case"), self.plan.num_tokens) / 1e9
        return notes | {"GFLOP per rank": round(gflop, 2)}


def _told(counts: dict[str, list[int]]) -> str:
    return ", ".join(f"{number} {kind} ({num_bytes / 1e6:.1f} MB)" for kind, (number, num_bytes) in counts.items())
