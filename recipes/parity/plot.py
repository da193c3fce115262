"""Plotting the parity runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from figures import agreement
from matplotlib import pyplot

_FLOOR = 1e-9
"""Equal losses have no logarithm; they are drawn here."""
_SHOWN = ("bf16", "dense_hp_muon", "strategies")


def plot_studies(studies: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the losses of each study, and below how far each run is from the first.

    Args:
        studies: Losses by run, by study. The first run is the reference.
        path: PNG file to write.
    """
    shown = [study for study in _SHOWN if study in studies]
    figure, rows = pyplot.subplots(2, len(shown), figsize=(5 * len(shown), 7), squeeze=False)
    for place, study in enumerate(shown):
        curves, gaps = rows[0][place], rows[1][place]
        first, *others = studies[study]
        reference = studies[study][first]
        steps = range(1, len(reference) + 1)
        curves.plot(steps, reference, label=first, linewidth=1)
        worst = min(agreement(reference, studies[study][run]).r for run in others)
        for run in others:
            found = studies[study][run]
            curves.plot(steps, found, label=run, linewidth=1, linestyle="--")
            gaps.plot(steps, [max(_FLOOR, abs(x - y)) for x, y in zip(reference, found, strict=True)], label=run)
        curves.set_title(f"{study}: training loss, r >= {worst:.9f}", fontsize=10)
        gaps.set_title(f"{study}: |difference| from {first}", fontsize=10)
        gaps.set_yscale("log")
        for axes in (curves, gaps):
            axes.set_xlabel("step")
            axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
