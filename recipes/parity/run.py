"""Train one model under every data-parallel wrapper and every strategy of Muon, and compare the losses.

python recipes/parity/run.py                 every study; logs go to outputs/, the table to the console
python recipes/parity/run.py bf16 moe_adamw  only these studies; bf16/hp_fsdp is one run of one
python recipes/parity/run.py --keep          also replace the logs of this folder and the plot
python recipes/parity/run.py --plot          only compare the kept logs again
Further arguments with "=" are Hydra overrides for every run.
"""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from figures import STUDIES, kept_log_path, kept_losses, losses, rows
from plot import plot_studies


def train(study: str, run: str, extra: list[str]) -> Path | None:
    """Run ``hp-muon train`` once; return its metrics file, or None if it was refused or failed."""
    chosen = STUDIES[study]
    name = f"parity_{study}_{run}"
    module = ["-m", "hp_muon_plugin.cli.main", "train", "--config-dir", str(HERE), "--config-name", "parity"]
    overrides = [*chosen.common, *chosen.runs[run], f"run.steps={chosen.steps}", f"run.name={name}", *extra]
    command = [sys.executable, *module, *overrides]
    print(f"\n$ hp-muon {' '.join(command[3:])}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code == 130:
        sys.exit(code)
    return None if code else Path("outputs") / name / "metrics.jsonl"


def main() -> None:
    """Entry point."""
    options = [argument for argument in sys.argv[1:] if argument in ("--keep", "--plot")]
    extra = [argument for argument in sys.argv[1:] if "=" in argument]
    wanted = [argument for argument in sys.argv[1:] if argument.partition("/")[0] in STUDIES] or list(STUDIES)
    for asked in [] if "--plot" in options else wanted:
        study, _, chosen = asked.partition("/")
        found = {}
        for run in [chosen] if chosen else STUDIES[study].runs:
            path = train(study, run, extra)
            if path is None:
                continue
            found[run] = losses(path)
            if "--keep" in options:
                kept_log_path(study, run).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept_log_path(study, run))
        if len(found) > 1:
            print("\n".join(rows(study, found)), flush=True)
    if options:
        kept = {study: found for study in STUDIES if (found := kept_losses(study))}
        for study, found in kept.items():
            print("\n".join(rows(study, found)))
        plot_studies(kept, HERE / "parity.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run has ended its ranks
        sys.exit(130)
