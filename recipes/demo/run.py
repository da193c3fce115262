"""The demo: train with hp_muon, then with adamw, each at its best learning rate, and plot both.

python recipes/demo/run.py            about two minutes on two cores
python recipes/demo/run.py --sweep    every learning rate of the sweep, into recipes/demo/sweep
"""

import argparse
import shutil
import signal
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


INTERRUPTED_EXIT = 130
PATIENCE_S = 5.0
"""How long an interrupted run may take to end its ranks; it needs up to 3 seconds."""


def run_to_end(command: list[str]) -> int:
    """Run a command; return its exit code, and 130 after Ctrl-C whatever the command made of it."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:  # a terminal sends it to the run as well, which ends its ranks and says so
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:  # sent to this process alone
            process.terminate()
            process.wait()
        return INTERRUPTED_EXIT


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
    code = run_to_end(command)
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


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="Hydra overrides for every run")
    parser.add_argument("--sweep", action="store_true", help="every learning rate; replaces the logs of this folder")
    found = parser.parse_args()
    for text in found.overrides:
        if "=" not in text:
            parser.error(f"{text} is not OPTION=VALUE")
    return found


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no run is left behind
    asked_for = arguments()
    try:
        (sweep if asked_for.sweep else demo)(asked_for.overrides)
    except KeyboardInterrupt:  # between two runs, or a second one
        sys.exit(INTERRUPTED_EXIT)


if __name__ == "__main__":
    main()
