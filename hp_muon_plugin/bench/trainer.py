"""``hp-muon bench trainer``: starts the ranks, and makes rows of what they found."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hp_muon_plugin.bench.report import Row
from hp_muon_plugin.bench.timing import Times, paired_ratio
from hp_muon_plugin.bench.trainer_cases import ALONE, OURS, REFERENCE
from hp_muon_plugin.bench.trainer_rank import Plan
from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.train.launch import launch_module
from hp_muon_plugin.train.worker import Failure

_MODULE = "hp_muon_plugin.bench.trainer_rank"
LIMIT = {"fp32": 1e-5, "bf16": 1e-2}
"""Relative difference of losses up to which a contender trains the same."""
_NOT_PEERS = (OURS, REFERENCE, ALONE, "hp_hsdp")


def run_here(plan: Plan, folder: Path, *, num_ranks: int) -> Failure | None:
    """Run the ranks on this machine.

    Args:
        plan: What they measure.
        folder: An empty folder for their results.
        num_ranks: Ranks.

    Returns:
        None, or the first failure.
    """
    path = folder / "plan.json"
    path.write_text(json.dumps(asdict(plan)), encoding="utf-8")
    return launch_module(
        [_MODULE, str(path), str(folder)], folder, num_ranks=num_ranks, threads=1, platform=PlatformName.auto
    )


def rows(plan: Plan, folder: Path, *, num_ranks: int) -> list[Row]:
    """What the ranks found.

    Args:
        plan: What they measured.
        folder: Where they left it.
        num_ranks: Ranks.

    Returns:
        One row for each case and clock.
    """
    made = []
    for number, case in enumerate(plan.cases):
        paths = [folder / f"found{rank}.{number}.json" for rank in range(num_ranks)]
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        made += [_row(plan, f"{case} {num_ranks} ranks", clock, ranks) for clock in ("wall", "cpu")]
    return made


def _row(plan: Plan, case: str, clock: str, ranks: list[dict[str, Any]]) -> Row:
    times = {name: _slowest(ranks, name) for name in ranks[0]["times"]}
    errors = {name: _difference(ranks[0]["losses"], name) for name in ranks[0]["losses"]}
    others = [name for name in times if name != OURS]
    peers = [name for name in others if name not in _NOT_PEERS]
    ratios = {name: paired_ratio(times[name], times[OURS], clock) for name in others if name != ALONE}
    limit = LIMIT[plan.precision]
    wrong = [name for name, error in errors.items() if error > limit]
    right = [ratios[name] for name in peers if name not in wrong and OURS not in wrong]
    notes: dict[str, Any] = {"rounds": len(times[OURS].wall), "optimizer": plan.optimizer}
    notes |= {f"{name} failed": why for name, why in ranks[0]["failed"].items()}
    if wrong:
        notes["WRONG"] = ", ".join(wrong)
    return Row(
        case=case,
        threads=1,
        clock=clock,
        ours=1e3 * times[OURS].median(clock),
        peers={name: 1e3 * times[name].median(clock) for name in others},
        ratio=min(right, default=0.0),
        floor=1e3 * times[ALONE].median(clock),
        right_ratio=min(right, default=None),
        ratios=ratios,
        errors={"ours" if name == OURS else name: error for name, error in errors.items()},
        notes=notes,
    )


def _slowest(ranks: list[dict[str, Any]], name: str) -> Times:
    """The slowest rank's time of each round."""
    cpu, wall = (
        [max(step) for step in zip(*(rank["times"][name][clock] for rank in ranks), strict=True)] for clock in (0, 1)
    )
    return Times(cpu, wall)


def _difference(losses: dict[str, list[float]], name: str) -> float:
    """Largest relative difference from Megatron's own wrapper in the checked steps."""
    return max(abs(x / y - 1) for x, y in zip(losses[name], losses[REFERENCE], strict=True))
