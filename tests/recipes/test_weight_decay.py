"""The figures in the recipe's README are what the kept raw logs say."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "weight_decay"
README = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())


def _figures() -> ModuleType:
    """By path: the demo has a neighbour of its own names."""
    spec = importlib.util.spec_from_file_location("weight_decay_figures", FOLDER / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures = _figures()
LOGS = [(seed, decay, log) for seed in figures.SEEDS for decay, log in figures.kept_logs(seed).items()]


@pytest.mark.parametrize(("seed", "decay", "log"), LOGS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_row_of_the_table_is_what_its_log_says(seed: str, decay: str, log: Any) -> None:
    assert len(log.series["loss/train"]) == 500
    row = [
        f"{log.series[figures.WEIGHT][100]:.3f}",
        f"{log.last(figures.WEIGHT):.3f}",
        f"{log.series[figures.OUTPUT][100]:.0f}",
        f"{log.last(figures.OUTPUT):.0f}",
        f"{log.last('loss/held_out'):.3f}",
        f"{log.held_out_late:.3f}",
    ]
    assert f"| {decay} | {seed} | {' | '.join(row)} |" in README.replace("**", "")


def test_what_is_said_of_bf16_follows_from_the_measured_updates() -> None:
    log = figures.kept_logs(figures.SEEDS[0])["0"]
    update = log.last(figures.UPDATE)
    assert f"RMS of {update:.4f}" in README
    assert f"stuck at {figures.stuck_above(update):.2f}" in README
    assert f"at a tenth of it at {figures.stuck_above(update / 10):.3f}" in README
    crossed = min(s for s, value in log.series[figures.WEIGHT].items() if value > figures.stuck_above(update / 10))
    assert re.search(rf"after {crossed} steps", README)


def test_decay_keeps_weights_and_outputs_bounded() -> None:
    for seed in figures.SEEDS:
        logs = figures.kept_logs(seed)
        weights = [logs[decay].last(figures.WEIGHT) for decay in figures.DECAYS]
        outputs = [logs[decay].last(figures.OUTPUT) for decay in figures.DECAYS]
        assert weights == sorted(weights, reverse=True)
        assert outputs[0] > 5 * outputs[2]
        kept = logs["0.1"].series[figures.WEIGHT]
        assert kept[500] == pytest.approx(kept[300], rel=0.05)  # no growth any more
