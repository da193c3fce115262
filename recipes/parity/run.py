"""Train one model under every data-parallel wrapper and every strategy of Muon, and compare the losses.

python recipes/parity/run.py                 every study; logs go to outputs/, the table to the console
python recipes/parity/run.py bf16 moe_adamw  only these studies; bf16/hp_fsdp is one run of one
python recipes/parity/run.py --keep          also replace the logs of this folder and the plot
python recipes/parity/run.py --plot          only compare the kept logs again
Further arguments with "=" are Hydra overrides for every run.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import recipe
from figures import STUDIES, kept_log_path, kept_losses, losses, rows
from plot import plot_studies


def train(study: str, run: str, extra: list[str]) -> Path | None:
    """Run ``hp-muon train`` once; return its metrics file, or None if it was refused or failed."""
    chosen = STUDIES[study]
    name = f"parity_{study}_{run}"
    overrides = [*chosen.common, *chosen.runs[run], f"run.steps={chosen.steps}", f"run.name={name}", *extra]
    code = recipe.train(HERE, "parity", overrides)
    if code == recipe.INTERRUPTED_EXIT:
        sys.exit(code)
    return None if code else Path("outputs") / name / "metrics.jsonl"


def complaint(asked: str) -> str | None:
    """What is wrong with the name of a study: it would otherwise start all of them, which takes hours."""
    study, slash, run = asked.partition("/")
    if study not in STUDIES:
        return f"{asked} is neither a study nor OPTION=VALUE; studies are {', '.join(STUDIES)}"
    if slash and run not in STUDIES[study].runs:
        return f"{asked}: {study} has no such run; there are {', '.join(STUDIES[study].runs)}"
    return None


def main() -> None:
    """Entry point."""
    flags = {
        "keep": "replace the logs and the plot of this folder",
        "plot": "train nothing; compare and plot the kept logs",
    }
    asked_for = recipe.parse(__doc__, flags, named="STUDY, STUDY/RUN", complaint=complaint)
    wanted, failed = asked_for.names or list(STUDIES), []
    for asked in [] if asked_for.plot else wanted:
        study, _, chosen = asked.partition("/")
        found = {}
        for run in [chosen] if chosen else STUDIES[study].runs:
            path = train(study, run, asked_for.overrides)
            if path is None:
                failed.append(f"{study}/{run}")
                continue
            found[run] = losses(path)
            if asked_for.keep:
                kept_log_path(study, run).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept_log_path(study, run))
        if len(found) > 1:
            print("\n".join(rows(study, found)), flush=True)
    if asked_for.keep or asked_for.plot:
        kept = {study: found for study in STUDIES if (found := kept_losses(study))}
        for study, found in kept.items():
            print("\n".join(rows(study, found)))
        plot_studies(kept, HERE / "parity.png")
    if failed:
        sys.exit(f"these runs were refused or failed, for the reasons above: {', '.join(failed)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the run has ended its ranks
        sys.exit(recipe.INTERRUPTED_EXIT)
