"""Reading the logs of demo runs: the best learning rate of a sweep, and who is faster.

Only the standard library: the README's figures are checked with these functions by a test.
"""

import json
from dataclasses import dataclass
from pathlib import Path

SWEEP = Path(__file__).parent / "sweep"


@dataclass(frozen=True)
class RunLog:
    """What one run wrote to ``metrics.jsonl``."""

    train: dict[int, float]
    held_out: dict[int, float]
    unigram: float

    @property
    def final(self) -> float:
        """Held-out loss after the last step, nats per token."""
        return self.held_out[max(self.held_out)]


def read_log(path: Path) -> RunLog:
    """Read a ``metrics.jsonl``."""
    train, held_out, unigram = {}, {}, float("nan")
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss/train" in entry:
            train[entry["step"]] = entry["loss/train"]
        if "loss/held_out" in entry:
            held_out[entry["step"]] = entry["loss/held_out"]
            unigram = entry["loss/unigram_entropy"]
    return RunLog(train, held_out, unigram)


def sweep_logs(optimizer: str) -> dict[float, RunLog]:
    """Logs of the kept sweep by learning rate."""
    paths = sorted(SWEEP.glob(f"{optimizer}_lr*.jsonl"))
    return {float(path.stem.partition("_lr")[2]): read_log(path) for path in paths}


def best_lr(optimizer: str) -> float:
    """The learning rate of the sweep with the lowest final held-out loss."""
    logs = sweep_logs(optimizer)
    return min(logs, key=lambda lr: logs[lr].final)


def step_reaching(log: RunLog, loss: float) -> float | None:
    """First step at which the held-out loss is at most ``loss``, on straight lines between evaluations."""
    steps = sorted(log.held_out)
    for before, after in zip(steps, steps[1:], strict=False):
        high, low = log.held_out[before], log.held_out[after]
        if low <= loss:
            return after if high <= loss or high == low else before + (after - before) * (high - loss) / (high - low)
    return None
