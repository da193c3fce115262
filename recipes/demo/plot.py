"""Plotting demo runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from results import RunLog, step_reaching

_COLORS = {"hp_muon": "tab:orange", "adamw": "tab:blue"}


def plot_runs(logs: dict[str, RunLog], rates: dict[str, float], path: Path) -> str:
    """Draw the loss of both optimizers, and say who reaches what when.

    Args:
        logs: Log by optimizer, ``hp_muon`` and ``adamw``.
        rates: Learning rate of each.
        path: PNG file to write.

    Returns:
        The sentence in the title.
    """
    muon, adamw = logs["hp_muon"], logs["adamw"]
    sentence = compare(muon, adamw)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, log in logs.items():
        color = _COLORS[name]
        axes.plot(list(log.train), list(log.train.values()), color=color, alpha=0.25, linewidth=1)
        axes.plot(
            list(log.held_out),
            list(log.held_out.values()),
            color=color,
            marker=".",
            label=f"{name}, lr {rates[name]:g}",
        )
    axes.axhline(muon.unigram, color="gray", linestyle="--", label="unigram entropy of the text")
    axes.axhline(adamw.final, color=_COLORS["adamw"], linestyle=":", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte); faint: training, dots: held out")
    axes.set_title(sentence, fontsize=10)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return sentence


def compare(muon: RunLog, adamw: RunLog) -> str:
    """One sentence: at which step Muon has AdamW's final held-out loss."""
    reached, last = step_reaching(muon, adamw.final), max(adamw.held_out)
    if reached is None:
        return f"hp_muon ({muon.final:.3f}) does not reach adamw's final held-out loss ({adamw.final:.3f})"
    return (
        f"hp_muon reaches adamw's final held-out loss ({adamw.final:.3f} after {last} steps) "
        f"after {reached:.0f} steps, and ends at {muon.final:.3f}"
    )
