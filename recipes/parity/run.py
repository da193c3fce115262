"""Train one model under every data-parallel wrapper and every strategy of Muon, and compare the losses.

python recipes/parity/run.py                 every study; logs go to outputs/, the table to the console
python recipes/parity/run.py bf16 moe_adamw  only these studies; bf16/hp_fsdp is one run of one
python recipes/parity/run.py --keep          also replace the logs of this folder and the plot
python recipes/parity/run.py --plot          only compare the kept logs again
Further arguments with "=" are Hydra overrides for every run.
"""

import argparse
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


def arguments() -> argparse.Namespace:
    """What the user asks for. A name that is no study would otherwise start all of them, which takes hours."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="*", help="STUDY, STUDY/RUN, or a Hydra override OPTION=VALUE")
    parser.add_argument("--keep", action="store_true", help="replace the logs and the plot of this folder")
    parser.add_argument("--plot", action="store_true", help="train nothing; compare and plot the kept logs")
    found = parser.parse_args()
    found.overrides = [text for text in found.what if "=" in text]
    found.wanted = [text for text in found.what if "=" not in text]
    for asked in found.wanted:
        study, slash, run = asked.partition("/")
        if study not in STUDIES:
            parser.error(f"{asked} is neither a study nor OPTION=VALUE; studies are {', '.join(STUDIES)}")
        if slash and run not in STUDIES[study].runs:
            parser.error(f"{asked}: {study} has no such run; there are {', '.join(STUDIES[study].runs)}")
    if found.plot and found.what:
        parser.error(f"--plot trains nothing, so that {found.what[0]} means nothing; leave it out")
    return found


def main() -> None:
    """Entry point."""
    asked_for = arguments()
    wanted, failed = asked_for.wanted or list(STUDIES), []
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
        sys.exit(130)
