"""Interleaved timing: every round runs every contender once, so that load falls on all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one contender, one entry per round.

    Attributes:
        cpu: CPU time of this process, all threads. Hardly depends on other load.
        wall: Wall time.
    """

    cpu: list[float]
    wall: list[float]

    def median(self, clock: str) -> float:
        """Median over the rounds.

        Args:
            clock: ``cpu`` or ``wall``.

        Returns:
            Seconds.
        """
        return statistics.median(self.of(clock))

    def of(self, clock: str) -> list[float]:
        """The samples of one clock."""
        return self.cpu if clock == "cpu" else self.wall


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    budget_s: float,
    least: int = 5,
    most: int = 41,
) -> dict[str, Times]:
    """Time contenders round by round, each round starting with the next one.

    Args:
        contenders: What to run, by name.
        device: Waited for before and after each run.
        budget_s: About how long to go on, seconds.
        least: Rounds at least.
        most: Rounds at most.

    Returns:
        Times by name, all with the same number of rounds; the first, untimed round warms up.
    """
    names = list(contenders)
    began = time.perf_counter()
    for name in names:
        contenders[name]()
        _wait(device)
    once = time.perf_counter() - began
    rounds = max(least, min(most, int(budget_s / max(once, 1e-9))))
    found = {name: Times([], []) for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            cpu, wall = _timed(contenders[name], device)
            found[name].cpu.append(cpu)
            found[name].wall.append(wall)
    return found


def paired_ratio(numerator: Times, denominator: Times, clock: str) -> float:
    """Median over the rounds of one contender's time divided by another's in the same round.

    Args:
        numerator: Times above.
        denominator: Times below.
        clock: ``cpu`` or ``wall``.

    Returns:
        The ratio; above 1 if the denominator is faster.
    """
    pairs = zip(numerator.of(clock), denominator.of(clock), strict=True)
    return statistics.median(above / below for above, below in pairs)


def _timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    _wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _wait(device)
    return time.process_time() - cpu, time.perf_counter() - wall


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
