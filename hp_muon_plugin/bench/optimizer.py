"""``hp-muon bench optimizer``: makes rows of what a race found."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_muon_plugin.bench.fsdp_traffic import SLOW
from hp_muon_plugin.bench.opt_cases import Case, least_bytes
from hp_muon_plugin.bench.opt_contenders import OURS, Peer
from hp_muon_plugin.bench.opt_lane import Job, Lane, LaneError
from hp_muon_plugin.bench.opt_memory import (
    GIB,
    RANK_BYTES,
    Free,
    contender_bytes,
    free_bytes,
    lacking,
    reference_bytes,
)
from hp_muon_plugin.bench.opt_ours import contenders, convention_of, copies_of
from hp_muon_plugin.bench.opt_places import Places
from hp_muon_plugin.bench.opt_race import Entrant, Result, lanes_of, race
from hp_muon_plugin.bench.report import Row
from hp_muon_plugin.bench.timing import paired_ratio
from hp_muon_plugin.errors import ConfigError

_CLOCKS = ("wall", "cpu")


@dataclass(frozen=True, slots=True)
class Field:
    """Who takes part.

    Attributes:
        strategies: Ours.
        peers: Everybody else, by name.
        places: Where peers run.
    """

    strategies: tuple[str, ...]
    peers: Mapping[str, Peer]
    places: Places


def run_cases(cases: Sequence[Case], field: Field, job: Job, folder: Path, *, seconds: float) -> list[Result]:
    """Race every case. Lanes live for one case, and are ended whatever happens.

    Args:
        cases: Models.
        field: Who takes part.
        job: What all lanes share.
        folder: An empty folder for logs and weights.
        seconds: About how long to time one case.

    Returns:
        A result for each case.

    Raises:
        LaneError: If ours cannot be started.
        Interrupted: After Ctrl-C.
    """
    entrants, main = _entrants(field, job, folder)
    return [_run_case(case, entrants, main, folder / "weights", seconds=seconds) for case in cases]


def expected_bytes(cases: Sequence[Case], field: Field, job: Job) -> dict[str, int]:
    """Memory that each case is expected to need while it is measured.

    Args:
        cases: Models.
        field: Who takes part.
        job: What all lanes share.

    Returns:
        Bytes by case.
    """
    entrants, _ = _entrants(field, job, Path())
    idle = len(lanes_of(entrants)) * job.num_ranks * RANK_BYTES
    conventions = [entrant.convention for entrant in entrants.values()]
    return {
        case.text: idle
        + reference_bytes(case, conventions)
        + sum(contender_bytes(case, entrant.copies, job.num_ranks) for entrant in entrants.values())
        for case in cases
    }


def check_memory(cases: Sequence[Case], field: Field, job: Job, free: Free = free_bytes) -> list[str]:
    """What to say of memory before anything starts.

    Args:
        cases: Models.
        field: Who takes part.
        job: What all lanes share.
        free: Memory that there is.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: If not even ours fit.
    """
    there = free()
    if there is None:
        return ["memory: this system does not tell how much is free"]
    alone = expected_bytes(cases, Field(field.strategies, {}, Places()), job)
    largest = max(alone, key=alone.__getitem__)
    if lacking(alone[largest], free):
        raise ConfigError(
            "--strategies",
            ",".join(field.strategies),
            f"in {largest} on {job.num_ranks} ranks ours need about {alone[largest] / GIB:.1f} GiB of memory, and "
            f"{there / GIB:.1f} GiB are free",
            "fewer strategies, a smaller case with --only, or fewer --ranks",
        )
    found = expected_bytes(cases, field, job)
    largest = max(found, key=found.__getitem__)
    text = f"memory: {largest} is expected to need about {found[largest] / GIB:.1f} GiB, {there / GIB:.1f} GiB are free"
    short = "; who finds no room when it is built is left out and named" if lacking(found[largest], free) else ""
    return [text + short]


def _entrants(field: Field, job: Job, folder: Path) -> tuple[dict[str, Entrant], Lane]:
    """Everybody with the lane that they run in, one for each environment; and the lane of ours. None is started."""
    lanes: dict[tuple[Any, ...], Lane] = {}

    def lane_of(python: str, environment: Mapping[str, str]) -> Lane:
        key = (python, *sorted(environment.items()))
        if key not in lanes:
            lanes[key] = Lane(python, job, folder / f"lane{len(lanes)}", environment)
        return lanes[key]

    main = lane_of(sys.executable, {})
    ours = contenders(field.strategies, replicas=job.replicas)
    entrants = {name: Entrant(main, convention_of(name), copies_of(name)) for name in ours}
    for name, python in field.places.python.items():
        peer = field.peers[name]
        lane = main if job.testbed is not None else lane_of(python, peer.environment)
        entrants[name] = Entrant(lane, peer.convention, peer.copies)
    return entrants, main


def _run_case(case: Case, entrants: dict[str, Entrant], main: Lane, weights: Path, *, seconds: float) -> Result:
    """A lane for which there is no room, or that does not start, takes its contenders along; ours must start."""
    lanes, out = lanes_of(entrants), dict[str, str]()
    try:
        for lane in lanes:
            why = None if lane is main else lacking(lane.job.num_ranks * RANK_BYTES, free_bytes)
            try:
                if why is None:
                    lane.start()
            except LaneError as error:
                if lane is main:
                    raise
                why = str(error)
            if why is not None:
                out |= {name: why for name, entrant in entrants.items() if entrant.lane is lane}
        there = {name: entrant for name, entrant in entrants.items() if name not in out}
        result = race(case, there, main, weights, seconds=seconds)
    finally:
        for lane in lanes:
            lane.stop()
    result.failed |= out
    return result


def rows(result: Result, field: Field, job: Job) -> list[Row]:
    """What was found.

    Args:
        result: Of one case.
        field: Who took part.
        job: What all lanes shared.

    Returns:
        For each of our contenders, one row by wall time and one by CPU time.
    """
    table = _Table(result, field, job)
    return [table.row(ours, clock) for ours in result.found if ours.startswith(OURS) for clock in _CLOCKS]


@dataclass(frozen=True, slots=True)
class _Table:
    result: Result
    field: Field
    job: Job

    def row(self, ours: str, clock: str) -> Row:
        found = self.result.found
        peers = [name for name in found if not name.startswith(OURS)]
        ratios = {name: self._ratio(name, ours, clock) for name in peers}
        right = [ratios[name] for name in peers if self._is_right(name) and self._is_right(ours)]
        shown = [ours, *peers]
        return Row(
            case=self._case(ours),
            threads=1,
            clock=clock,
            ours=self._ms(ours, clock),
            peers={name: self._ms(name, clock) for name in peers},
            ratio=min(right, default=0.0),
            floor=1e3 * self.floor_s(clock),
            right_ratio=min(right, default=None),
            ratios=ratios,
            errors={OURS if name == ours else name: found[name].verdict.error for name in shown},
            notes=self._notes(ours, shown),
        )

    def _ms(self, name: str, clock: str) -> float:
        entry = self.result.found[name]
        return 1e3 * entry.times(set(entry.rounds)).median(clock)

    def _ratio(self, peer: str, ours: str, clock: str) -> float:
        above, below = self.result.found[peer], self.result.found[ours]
        both = set(above.rounds) & set(below.rounds)
        return paired_ratio(above.times(both), below.times(both), clock)

    def _is_right(self, name: str) -> bool:
        return self.result.found[name].verdict.is_right

    def _case(self, ours: str) -> str:
        shards, replicas = self.job.num_ranks // self.job.replicas, self.job.replicas
        mesh = f"{replicas}x{shards}" if replicas > 1 else f"{shards} ranks"
        rate = f" at {self.job.testbed.rate}" if self.job.testbed else ""
        return f"{self.result.case} {mesh}{rate}: {ours.removeprefix(OURS).strip()}"

    def floor_s(self, clock: str) -> float:
        """The longer of computing everything once, and of sending the least that must be sent."""
        result, job = self.result, self.job
        flops = sum(weight.ns_flops() for weight in result.case.weights) / job.num_ranks
        sent = sum(least_bytes(weight, job.num_ranks // job.replicas) for weight in result.case.weights)
        speed = result.link[clock]
        if job.testbed is not None and clock == "wall" and job.testbed.bytes_per_s:
            counts = [entry.sent.get(SLOW, []) for entry in result.found.values()]
            sent = min((statistics.median(count) for count in counts if count), default=0.0)
            speed = job.testbed.bytes_per_s
        return max(flops / result.rates[clock]["matmul"], sent / speed if speed else 0.0)

    def _notes(self, ours: str, names: list[str]) -> dict[str, Any]:
        found = self.result.found
        notes: dict[str, Any] = {"rounds": len(found[ours].rounds)}
        wrong = [
            f"{name} ({found[name].verdict.name} is off by {found[name].verdict.error:.1e})"
            for name in names
            if not self._is_right(name)
        ]
        if wrong:
            notes["WRONG"] = ", ".join(wrong)
        for name, why in self.result.failed.items():
            notes[f"FAILED {name}"] = why
        for name, why in self.field.places.absent.items():
            notes[f"absent {name}"] = why
        for name in names:
            notes[f"c10d calls of {name}"] = _told(found[name].calls)
            if self.job.testbed is not None:
                notes[f"slow-link MB of {name}"] = round(statistics.median(found[name].sent.get(SLOW, [0])) / 1e6, 3)
        gflop = sum(weight.ns_flops() for weight in self.result.case.weights) / 1e9
        return notes | {"GFLOP of all matrices": round(gflop, 1)}


def _told(counts: Mapping[str, tuple[int, int]]) -> str:
    if not counts:
        return "none"
    return ", ".join(f"{number} {kind} ({num_bytes / 1e6:.1f} MB)" for kind, (number, num_bytes) in counts.items())
