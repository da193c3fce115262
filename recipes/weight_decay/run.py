"""Train the same tiny MoE with weight decay 0, 0.01 and 0.1, and plot how weights and outputs grow.

python recipes/weight_decay/run.py           logs and plot go to outputs/
python recipes/weight_decay/run.py --keep    logs of both seeds, which also replace those of this folder
python recipes/weight_decay/run.py --plot    only plot the kept logs again
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from figures import DECAYS, LOGS, OUTPUT, SEEDS, WEIGHT, kept_log_path, kept_logs, read_log
from plot import plot_runs

PLOT = HERE / "weight_decay.png"


def train(decay: str, seed: str, extra: list[str]) -> Path:
    """Run ``hp-muon train`` with one decay; return its metrics file."""
    name = f"weight_decay_{decay}_{seed}"
    module = ["-m", "hp_muon_plugin.cli.main", "train", "--config-dir", str(HERE), "--config-name", "weight_decay"]
    command = [sys.executable, *module, f"optimizer.weight_decay={decay}", f"run.seed={seed}", f"run.name={name}"]
    command += extra
    print(f"\n$ hp-muon {' '.join(command[3:])}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)
    return Path("outputs") / name / "metrics.jsonl"


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="Hydra overrides for every run")
    parser.add_argument("--keep", action="store_true", help="both seeds; replace the logs and the plot of this folder")
    parser.add_argument("--plot", action="store_true", help="train nothing; plot the kept logs")
    found = parser.parse_args()
    for text in found.overrides:
        if "=" not in text or found.plot:
            parser.error(
                f"{text} is not OPTION=VALUE" if "=" not in text else f"--plot trains nothing: leave out {text}"
            )
    return found


def main() -> None:
    """Entry point."""
    asked_for = arguments()
    if asked_for.plot:
        plot_runs(kept_logs(), PLOT)
        return
    for seed in SEEDS if asked_for.keep else SEEDS[:1]:
        paths = {decay: train(decay, seed, asked_for.overrides) for decay in DECAYS}
        logs = {decay: read_log(path) for decay, path in paths.items()}
        for decay, log in logs.items():
            print(f"weight decay {decay}: weights {log.last(WEIGHT):.3f}, outputs {log.last(OUTPUT):.1f}, ", end="")
            print(f"held-out loss {log.last('loss/held_out'):.3f}")
        plot_runs(logs, Path("outputs") / f"weight_decay_{seed}.png")
        if asked_for.keep:
            LOGS.mkdir(exist_ok=True)
            for decay, path in paths.items():
                shutil.copy(path, kept_log_path(decay, seed))
    if asked_for.keep:
        plot_runs(kept_logs(), PLOT)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run has ended its ranks
        sys.exit(130)
