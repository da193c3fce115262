"""Plotting the weight-decay runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from figures import OUTPUT, UPDATE, WEIGHT, RunLog, stuck_above
from matplotlib import pyplot

_COLORS = {"0": "tab:red", "0.01": "tab:orange", "0.1": "tab:blue"}


def plot_runs(logs: dict[str, RunLog], path: Path) -> None:
    """Draw weights, outputs and held-out loss over steps.

    Args:
        logs: Log by weight decay.
        path: PNG file to write.
    """
    figure, (weights, outputs, losses) = pyplot.subplots(1, 3, figsize=(15, 4.8))
    for decay, log in logs.items():
        color, label = _COLORS[decay], f"weight decay {decay}"
        _line(weights, log.series[WEIGHT], color, label)
        _line(outputs, log.series[OUTPUT], color, label)
        _line(losses, log.series["loss/held_out"], color, label)
    typical = logs["0"].last(UPDATE)
    for factor, style in ((1.0, "-"), (0.1, "--"), (0.01, ":")):
        words = "this learning rate" if factor == 1.0 else f"{factor:g} of it"
        weights.axhline(stuck_above(factor * typical), color="gray", linestyle=style, label=f"stuck in bf16 at {words}")
    weights.set_yscale("log")
    weights.set_title("RMS of expert weights (first layers)", fontsize=10)
    outputs.set_title("RMS of the last layer's output", fontsize=10)
    losses.set_title("held-out loss (nats per byte)", fontsize=10)
    for axes in (weights, outputs, losses):
        axes.set_xlabel("step")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axes: pyplot.Axes, series: dict[int, float], color: str, label: str) -> None:
    axes.plot(list(series), list(series.values()), color=color, label=label)
