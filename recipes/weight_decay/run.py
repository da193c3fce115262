"""Train the same tiny MoE with weight decay 0, 0.01 and 0.1, and plot how weights and outputs grow.

python recipes/weight_decay/run.py           logs and plot go to outputs/
python recipes/weight_decay/run.py --keep    logs of both seeds, which also replace those of this folder
python recipes/weight_decay/run.py --plot    only plot the kept logs again
"""

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


def main() -> None:
    """Entry point; further arguments are Hydra overrides for every run."""
    options = [argument for argument in sys.argv[1:] if argument in ("--keep", "--plot")]
    extra = [argument for argument in sys.argv[1:] if argument not in options]
    if "--plot" in options:
        plot_runs(kept_logs(), PLOT)
        return
    for seed in SEEDS if "--keep" in options else SEEDS[:1]:
        paths = {decay: train(decay, seed, extra) for decay in DECAYS}
        logs = {decay: read_log(path) for decay, path in paths.items()}
        for decay, log in logs.items():
            print(f"weight decay {decay}: weights {log.last(WEIGHT):.3f}, outputs {log.last(OUTPUT):.1f}, ", end="")
            print(f"held-out loss {log.last('loss/held_out'):.3f}")
        plot_runs(logs, Path("outputs") / f"weight_decay_{seed}.png")
        if "--keep" in options:
            LOGS.mkdir(exist_ok=True)
            for decay, path in paths.items():
                shutil.copy(path, kept_log_path(decay, seed))
    if "--keep" in options:
        plot_runs(kept_logs(), PLOT)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run has ended its ranks
        sys.exit(130)
