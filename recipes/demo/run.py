"""The demo: train with hp_muon, then with adamw, each at its best learning rate, and plot both.

python recipes/demo/run.py            about two minutes on two cores
python recipes/demo/run.py --sweep    every learning rate of the sweep, into recipes/demo/sweep
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from plot import plot_runs
from results import SWEEP, best_lr, read_log

OPTIMIZERS = ("hp_muon", "adamw")
RATES = {
    "hp_muon": (0.005, 0.01, 0.02, 0.04),
    "adamw": (0.00075, 0.0015, 0.003, 0.006),
}


def train(optimizer: str, rate: float, name: str, *extra: str) -> Path:
    """Run ``hp-muon train`` on the demo's config; return its metrics file."""
    command = [
        sys.executable,
        "-m",
        "hp_muon_plugin.cli.main",
        "train",
        "--config-dir",
        str(HERE),
        "--config-name",
        "demo",
        f"optimizer={optimizer}",
        f"optimizer.lr={rate:g}",
        f"run.name={name}",
        *extra,
    ]
    print(f"\n$ hp-muon {' '.join(command[3:])}", flush=True)
    code = subprocess.run(command, check=False).returncode
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
    """Entry point; further arguments are Hydra overrides for every run."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--sweep"]:
        sweep(arguments[1:])
    else:
        demo(arguments)


if __name__ == "__main__":
    main()
