"""Rows of a benchmark, written as JSON, Markdown and a plot."""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One case at one number of threads.

    Attributes:
        case: What was measured.
        threads: CPU threads.
        clock: ``cpu`` or ``wall``: the clock of every time in the row.
        ours: Our median, milliseconds.
        peers: Median of each peer, milliseconds.
        ratio: Median over the rounds of (fastest peer / ours); above 1 we are faster.
        floor: Least time that the machine's measured rates allow for this result, milliseconds.
        right_ratio: As ``ratio``, over the peers whose result is as accurate as ours; None if there are none.
        ratios: Of every peer.
        wall: Wall-clock medians of everyone where ``clock`` is another one, milliseconds; ours as ``ours``.
        wall_ratios: As ``ratios``, by wall clock.
        errors: Relative error of everyone's result, ours as ``ours``.
        notes: More figures, by name.
    """

    case: str
    threads: int
    clock: str
    ours: float
    peers: dict[str, float]
    ratio: float
    floor: float
    right_ratio: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)
    wall_ratios: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def write_report(
    folder: Path, name: str, title: str, rows: Sequence[Row], machine: dict[str, Any], *, about: Sequence[str]
) -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and, where matplotlib is installed, ``NAME.png``.

    Args:
        folder: Where; made if needed.
        name: File name without ending.
        title: Heading.
        rows: What was measured.
        machine: Where, and its rates.
        about: Sentences for the reader, one per paragraph.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.json", folder / f"{name}.md"]
    content = {"machine": machine, "rows": [_rounded(asdict(row)) for row in rows]}
    written[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    written[1].write_text(markdown(title, rows, machine, about=about), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        written.append(folder / f"{name}.png")
        _plot(written[-1], title, rows)
    return written


def markdown(title: str, rows: Sequence[Row], machine: dict[str, Any], *, about: Sequence[str]) -> str:
    """The report as text.

    Args:
        title: Heading.
        rows: What was measured.
        machine: Where, and its rates.
        about: Sentences for the reader, one per paragraph.

    Returns:
        Markdown.
    """
    lines = [f"# {title}", "", *[line for text in about for line in (text, "")]]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    for threads, clock in sorted({(row.threads, row.clock) for row in rows}):
        chosen = [row for row in rows if (row.threads, row.clock) == (threads, clock)]
        peers = list(dict.fromkeys(peer for row in chosen for peer in row.peers))
        heads = ["case", "ours", *peers, "fastest peer / ours", "as accurate peer / ours", "floor", "ours / floor"]
        lines += ["", f"## {clock} time, {threads} thread{'s' * (threads > 1)}, milliseconds", ""]
        lines += ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for row in chosen:
            times = [_peer_cell(row, peer) for peer in peers]
            right = "" if row.right_ratio is None else f"{row.right_ratio:.2f}"
            cells = [row.case, _ms(row.ours), *times, f"{row.ratio:.2f}", right, _ms(row.floor)]
            lines.append("| " + " | ".join([*cells, f"{row.ours / row.floor:.2f}"]) + " |")
        lines += _wall_lines(chosen, peers)
    errors = {row.case: row.errors for row in rows if row.errors}
    if errors:
        names = list(dict.fromkeys(name for found in errors.values() for name in found))
        lines += ["", "## Relative error of the result", ""]
        lines += ["| case | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
        for case, found in errors.items():
            cells = [f"{found[name]:.1e}" if name in found else "" for name in names]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    noted = [row for row in rows if row.notes]
    if noted:
        lines += ["", "## Notes", ""]
        for row in {row.case: row for row in noted}.values():
            told = "; ".join(f"{key}: {value}" for key, value in row.notes.items())
            lines.append(f"- {row.case}: {told}")
    return "\n".join(lines) + "\n"


def _wall_lines(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    timed = [row for row in rows if row.wall]
    if not timed:
        return []
    threads = timed[0].threads
    lines = ["", f"## wall time, {threads} thread{'s' * (threads > 1)}, milliseconds", ""]
    lines += ["| " + " | ".join(["case", "ours", *peers]) + " |", "|---|" + "---:|" * (len(peers) + 1)]
    for row in timed:
        cells = [f"{_ms(row.wall[peer])} ({row.wall_ratios[peer]:.2f}x)" if peer in row.wall else "" for peer in peers]
        lines.append("| " + " | ".join([row.case, _ms(row.wall["ours"]), *cells]) + " |")
    return lines


def _peer_cell(row: Row, peer: str) -> str:
    if peer not in row.peers:
        return ""
    return f"{_ms(row.peers[peer])} ({row.ratios[peer]:.2f}x)" if peer in row.ratios else _ms(row.peers[peer])


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    threads, clock = min((row.threads, row.clock) for row in rows)
    chosen = [row for row in rows if (row.threads, row.clock) == (threads, clock)]
    peers = list(dict.fromkeys(peer for row in chosen for peer in row.ratios))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.45 * len(chosen) * max(1, len(peers) / 3)))
    height = 0.8 / max(1, len(peers))
    for number, peer in enumerate(peers):
        places = [index + number * height for index, row in enumerate(chosen) if peer in row.ratios]
        axes.barh(places, [row.ratios[peer] for row in chosen if peer in row.ratios], height, label=peer)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(chosen))], [row.case for row in chosen])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"time of the peer / ours ({clock} time, {threads} thread{'s' * (threads > 1)}); right of 1: ours is faster"
    )
    axes.set_title(title)
    if peers:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
