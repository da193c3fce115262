"""The driver of ``hp-muon bench optimizer``: builds, judges and times contenders of all lanes in turn."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hp_muon_plugin.bench.opt_cases import Case
from hp_muon_plugin.bench.opt_convention import Convention, Reference, Verdict
from hp_muon_plugin.bench.opt_lane import Lane, LaneError
from hp_muon_plugin.bench.opt_memory import SHARDED, Free, contender_bytes, free_bytes, lacking
from hp_muon_plugin.bench.timing import Times

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 41
_RATES_S = 1.0
_SLOW, _SLOW_EVERY = 4.0, 3
"""Who takes this many times as long as the fastest runs in every third round only."""


@dataclass(slots=True)
class Found:
    """What is known of one contender.

    Attributes:
        verdict: Of its result.
        calls: Collectives of one step on rank 0, as c10d saw them: name to (calls, bytes).
        rounds: Slowest rank of each round that it ran in, by round.
        sent: Bytes that left the busiest node in each round, by interface.
    """

    verdict: Verdict
    calls: dict[str, tuple[int, int]]
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)

    def times(self, rounds: set[int]) -> Times:
        """Times of some rounds.

        Args:
            rounds: Which; it ran in all of them.

        Returns:
            The times, in order.
        """
        chosen = [self.rounds[number] for number in sorted(rounds)]
        return Times([entry["cpu"] for entry in chosen], [entry["wall"] for entry in chosen])


@dataclass(slots=True)
class Result:
    """One case.

    Attributes:
        case: The case.
        found: By contender, whoever took part.
        failed: Why a contender took no part.
        rates: Matmul and copy rates of a rank while all ranks work, by clock.
        link: Bytes per second that a rank sends while all do, by clock.
    """

    case: Case
    found: dict[str, Found] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender, and where it runs.

    Attributes:
        lane: Its ranks.
        convention: What its step is.
        copies: Whole float32 models that a rank holds of it.
    """

    lane: Lane
    convention: Convention
    copies: float = SHARDED


def race(
    case: Case, entrants: dict[str, Entrant], main: Lane, folder: Path, *, seconds: float, free: Free = free_bytes
) -> Result:
    """Judge everyone against the reference, then time everyone round by round.

    Args:
        case: The model.
        entrants: By name.
        main: The lane that machine rates are measured in.
        folder: For weights of ranks.
        seconds: About how long to time.
        free: Memory that there is; who would not fit takes no part.

    Returns:
        The result.
    """
    result = Result(case)
    for lane in lanes_of(entrants):
        _begin(lane, case)
    _judge_all(result, entrants, folder, free)
    measured = main.ask({"do": "rates", "budget_s": min(_RATES_S, seconds)})
    for clock in ("cpu", "wall"):
        ranks = [rank[clock] for rank in measured]
        result.rates[clock] = {kind: sum(rank[kind] for rank in ranks) / len(ranks) for kind in ranks[0]}
    links = main.ask({"do": "link"})
    result.link = {clock: sum(rank[clock] for rank in links) / len(links) for clock in ("cpu", "wall")}
    _time(result, entrants, seconds)
    return result


def _judge_all(result: Result, entrants: dict[str, Entrant], folder: Path, free: Free) -> None:
    """Build and judge everyone for whom there is room. What the reference needs is gone before times are taken."""
    case, reference = result.case, Reference(result.case)
    for name, entrant in entrants.items():
        why = lacking(contender_bytes(case, entrant.copies, entrant.lane.job.num_ranks), free)
        if why is not None:
            result.failed[name] = why
            continue
        try:
            entrant.lane.ask({"do": "build", "name": name})
            verdict = _judged(name, entrant, reference, folder)
            calls = entrant.lane.ask({"do": "count", "name": name})[0]["calls"]
            result.found[name] = Found(verdict, {kind: tuple(entry) for kind, entry in calls.items()})
        except LaneError as error:
            result.failed[name] = str(error)
            _revive(entrant.lane, case, [other for other in result.found if entrants[other].lane is entrant.lane])


def lanes_of(entrants: dict[str, Entrant]) -> list[Lane]:
    """Lanes of some contenders.

    Args:
        entrants: By name.

    Returns:
        Each lane once, in order.
    """
    return list({id(entrant.lane): entrant.lane for entrant in entrants.values()}.values())


def _judged(name: str, entrant: Entrant, reference: Reference, folder: Path) -> Verdict:
    folder.mkdir(parents=True, exist_ok=True)
    entrant.lane.ask({"do": "judge", "name": name, "path": str(folder / "weights.{}.pt")})
    paths = [folder / f"weights.{rank}.pt" for rank in range(entrant.lane.job.num_ranks)]
    with entrant.lane.job.stop.at_once():
        ranks: list[Any] = [torch.load(path, weights_only=True) for path in paths]
        for path in paths:
            path.unlink()
        return reference.judge(entrant.convention, ranks)


def _begin(lane: Lane, case: Case) -> None:
    """Tell a lane its next case; one whose ranks ended since the last case is started again."""
    try:
        lane.ask({"do": "case", "case": case.text})
    except LaneError:
        _revive(lane, case, [])


def _revive(lane: Lane, case: Case, names: list[str]) -> None:
    """Start a lane again without the contender that broke it."""
    lane.start()
    lane.ask({"do": "case", "case": case.text})
    for name in names:
        lane.ask({"do": "build", "name": name})


def _time(result: Result, entrants: dict[str, Entrant], seconds: float) -> None:
    """Every contender once in a round, each round starting with the next one; slow ones in some rounds."""
    first: dict[str, float] = {}
    for name in list(result.found):  # warms up, and shows who is slow
        step = _step(name, result, entrants)
        if step is not None:
            first[name] = step["wall"]
    for name, number in _turns(first, seconds):
        step = _step(name, result, entrants) if name in result.found else None
        if step is not None:
            result.found[name].rounds[number] = {"cpu": step["cpu"], "wall": step["wall"]}
            for interface, count in step["sent"].items():
                result.found[name].sent.setdefault(interface, []).append(count)


def _turns(first: dict[str, float], seconds: float) -> Iterator[tuple[str, int]]:
    fastest = min(first.values(), default=0.0)
    every = {name: _SLOW_EVERY if took > _SLOW * fastest else 1 for name, took in first.items()}
    once = sum(took / every[name] for name, took in first.items())
    names = list(first)
    for number in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(seconds / max(once, 1e-9))))):
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if number % every[name] == 0:
                yield name, number


def _step(name: str, result: Result, entrants: dict[str, Entrant]) -> dict[str, Any] | None:
    """The slowest rank's times of one step; None if its lane broke, which takes its other contenders along."""
    lane = entrants[name].lane
    try:
        ranks = lane.ask({"do": "step", "name": name})
    except LaneError as error:
        gone = [other for other in result.found if entrants[other].lane is lane and not result.found[other].rounds]
        result.failed |= {other: str(error) for other in {*gone, name}}
        for other in {*gone, name}:
            del result.found[other]
        _revive(lane, result.case, [other for other in result.found if entrants[other].lane is lane])
        return None
    interfaces = {interface for rank in ranks for interface in rank["sent"]}
    sent = {interface: max(rank["sent"].get(interface, 0) for rank in ranks) for interface in interfaces}
    return {clock: max(rank[clock] for rank in ranks) for clock in ("cpu", "wall")} | {"sent": sent}
