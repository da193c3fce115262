"""The demo: train with hp_muon, then with adamw, each at its best learning rate, and plot both.

python recipes/demo/run.py            about two minutes on two cores
python recipes/demo/run.py --sweep    every learning rate of the sweep, into recipes/demo/sweep
"""

import shutil
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import recipe
from plot import plot_runs
from results import SWEEP, best_lr, read_log

OPTIMIZERS = ("hp_muon", "adamw")
RATES = {
    "hp_muon": (0.005, 0.01, 0.02, 0.04),
    "adamw": (0.00075, 0.0015, 0.003, 0.006),
}


def train(optimizer: str, rate: float, name: str, *extra: str) -> Path:
    """Run ``hp-muon train`` on the demo's config; return its metrics file."""
    chosen = [f"optimizer={optimizer}", f"optimizer.lr={rate:g}", f"run.name={name}", *extra]
    code = recipe.train(HERE, "demo", chosen)
    if code:
        sys.exit(code)
    return Path("outputs") / name / "metrics.jsonl"


def sweep(extra: list[str]) -> None:
    """Train at every learning rate and keep the raw logs."""
    SWEEP.mkdir(exist_ok=True)
    for optimizer in OPTIMIZERS:
        for rate in RATES[optimizer]:
            log = train(optimizer, rate, f"sweep_{optimizer}_lr{rate:g}", *extra)
            shutil.copy(log, SWEEP / f"{optimizer}_lr{rate:g}.jsonl")


def demo(extra: list[str]) -> None:
    """Train with both optimizers and plot."""
    began = time.monotonic()
    rates = {name: best_lr(name) for name in OPTIMIZERS}
    logs = {name: read_log(train(name, rates[name], f"demo_{name}", *extra)) for name in OPTIMIZERS}
    path = Path("outputs") / "demo.png"
    sentence = plot_runs(logs, rates, path)
    print(f"\n{sentence}")
    print(f"unigram entropy of the text: {logs['hp_muon'].unigram:.3f} nats per byte")
    print(f"plot: {path}   ({time.monotonic() - began:.0f} s)")


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no run is left behind
    asked_for = recipe.parse(__doc__, {"sweep": "every learning rate; replaces the logs of this folder"})
    try:
        (sweep if asked_for.sweep else demo)(asked_for.overrides)
    except KeyboardInterrupt:  # between two runs, or a second one
        sys.exit(recipe.INTERRUPTED_EXIT)


if __name__ == "__main__":
    main()
