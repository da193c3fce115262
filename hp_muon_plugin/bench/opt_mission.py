"""The mission's figures, as ratios beside ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_muon_plugin.bench.opt_naive import NAIVE
from hp_muon_plugin.bench.opt_race import Result
from hp_muon_plugin.bench.timing import paired_ratio


@dataclass(frozen=True, slots=True)
class Figure:
    """What the mission says of one change.

    Attributes:
        what: The change.
        before: Milliseconds before, or 2 where only a ratio is given.
        after: Milliseconds after.
        slow: Contender without it.
        fast: Contender with it.
        cases: Where it is measured here.
        has_replicas: Whether the mesh has replicas.
    """

    what: str
    before: float
    after: float
    slow: str
    fast: str
    cases: tuple[str, ...]
    has_replicas: bool = False

    @property
    def ratio(self) -> float:
        """The mission's."""
        return self.before / self.after


FIGURES: Sequence[Figure] = (
    Figure(
        "every matrix on one rank only, not on all (485 to 129 ms)",
        485.0,
        129.0,
        "ours allgather (fsdp2)",
        "ours allgather_dedup (fsdp2)",
        ("505b", "dense"),
    ),
    Figure("experts stay where they are (4.9 to 1.1 ms)", 4.9, 1.1, NAIVE, "ours auto (fsdp2)", ("experts",)),
    Figure("74 matrices of 24 x 10240 at once (74 to 2.4 ms)", 74.0, 2.4, NAIVE, "ours auto (fsdp2)", ("fused",)),
    Figure(
        "replicas divide the matrices (2x)",
        2.0,
        1.0,
        "ours auto (hp)",
        "ours auto (hp broadcast)",
        ("505b", "dense"),
        has_replicas=True,
    ),
)


def compare(result: Result, *, replicas: int) -> list[dict[str, Any]]:
    """The figures that a case shows.

    Args:
        result: Of the case.
        replicas: Size of the replicate axis.

    Returns:
        For each, the change, the contenders, and the ratio of the mission and of this run by both clocks.
    """
    found = []
    for figure in FIGURES:
        names = (figure.slow, figure.fast)
        entries = [result.found.get(name) for name in names]
        if result.case.text not in figure.cases or figure.has_replicas is (replicas == 1):
            continue
        slow, fast = entries
        if slow is None or fast is None or not (slow.verdict.is_right and fast.verdict.is_right):
            continue
        both = set(slow.rounds) & set(fast.rounds)
        times = slow.times(both), fast.times(both)
        measured = {clock: round(paired_ratio(*times, clock), 2) for clock in ("wall", "cpu")}
        case = {"what": figure.what, "case": result.case.text, "from": figure.slow, "to": figure.fast}
        found.append(case | {"mission": round(figure.ratio, 2), **measured})
    return found


def table(figures: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown.

    Args:
        figures: As :func:`compare` gives them.

    Returns:
        A table; empty if there are none.
    """
    if not figures:
        return ""
    lines = ["The mission's figures, which are of 512 accelerators, as ratios of a step before and after a change:", ""]
    lines += [
        "| change | case | from | to | the mission | here, wall | here, CPU |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for entry in figures:
        cells = [entry[key] for key in ("what", "case", "from", "to", "mission", "wall", "cpu")]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)
