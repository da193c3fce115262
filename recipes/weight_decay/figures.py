"""Reading the logs of the weight-decay runs, and what bf16 can still show of them.

Only the standard library: the README's figures are checked with these functions by a test.
"""

import json
from dataclasses import dataclass
from pathlib import Path

LOGS = Path(__file__).parent / "logs"
DECAYS = ("0", "0.01", "0.1")
SEEDS = ("1234", "4321")
WEIGHT, UPDATE = "rms/weight/expert_first", "rms/update/expert_first"
OUTPUT = "rms/output/layer003"
BF16_ROUNDING = 2.0**-8
"""Largest half distance between neighbours of bf16, relative to the number: 8 bits of significand."""


@dataclass(frozen=True)
class RunLog:
    """What one run wrote to ``metrics.jsonl``: values by step, by metric."""

    series: dict[str, dict[int, float]]

    def last(self, name: str) -> float:
        """The value after the last step that has one."""
        steps = self.series[name]
        return steps[max(steps)]

    @property
    def held_out_late(self) -> float:
        """Mean of the last four held-out losses; at a constant rate single ones are noisy."""
        losses = self.series["loss/held_out"]
        chosen = sorted(losses)[-4:]
        return sum(losses[step] for step in chosen) / len(chosen)


def read_log(path: Path) -> RunLog:
    """Read a ``metrics.jsonl``."""
    series: dict[str, dict[int, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        step = entry.pop("step")
        for name, value in entry.items():
            if isinstance(value, int | float):
                series.setdefault(name, {})[step] = value
    return RunLog(series)


def kept_log_path(decay: str, seed: str) -> Path:
    """Where the raw log of a run is kept."""
    return LOGS / f"decay{decay}_seed{seed}.jsonl"


def kept_logs(seed: str = SEEDS[0]) -> dict[str, RunLog]:
    """The kept raw logs of one seed by weight decay."""
    return {decay: read_log(kept_log_path(decay, seed)) for decay in DECAYS}


def stuck_above(update_rms: float) -> float:
    """RMS of weights stored in bf16 from which typical updates begin to be rounded away; at twice that all are.

    An update below half the distance to the next number changes nothing. That half is at most
    ``2^-8`` of the weight (just above a power of two) and at least ``2^-9``.
    """
    return update_rms / BF16_ROUNDING
