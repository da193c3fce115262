"""Train the same tiny MoE with weight decay 0, 0.01 and 0.1, and plot how weights and outputs grow.

python recipes/weight_decay/run.py           logs and plot go to outputs/
python recipes/weight_decay/run.py --keep    logs of both seeds, which also replace those of this folder
python recipes/weight_decay/run.py --plot    only plot the kept logs again
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import recipe
from figures import DECAYS, LOGS, OUTPUT, SEEDS, WEIGHT, kept_log_path, kept_logs, read_log
from plot import plot_runs

PLOT = HERE / "weight_decay.png"


def train(decay: str, seed: str, extra: list[str]) -> Path:
    """Run ``hp-muon train`` with one decay; return its metrics file."""
    name = f"weight_decay_{decay}_{seed}"
    chosen = [f"optimizer.weight_decay={decay}", f"run.seed={seed}", f"run.name={name}", *extra]
    code = recipe.train(HERE, "weight_decay", chosen)
    if code:
        sys.exit(code)
    return Path("outputs") / name / "metrics.jsonl"


def main() -> None:
    """Entry point."""
    flags = {
        "keep": "both seeds; replace the logs and the plot of this folder",
        "plot": "train nothing; plot the kept logs",
    }
    asked_for = recipe.parse(__doc__, flags)
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
        sys.exit(recipe.INTERRUPTED_EXIT)
