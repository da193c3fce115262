"""What the ``run.py`` of every recipe shares: its command line, and ``hp-muon train`` on the recipe's config."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

INTERRUPTED_EXIT = 130
PATIENCE_S = 5.0
"""How long an interrupted run may take to end its ranks; it needs up to 3 seconds."""
_PLOT = "plot"


def parse(
    about: str | None,
    flags: Mapping[str, str],
    *,
    named: str = "",
    complaint: Callable[[str], str | None] = lambda text: f"{text} is not OPTION=VALUE",
) -> argparse.Namespace:
    """Read the command line; a mistake ends the process before anything has started.

    Args:
        about: The script's docstring, which ``--help`` shows.
        flags: What each flag does, by its name. With ``plot`` nothing is trained, so that it stands alone.
        named: What may be named besides Hydra overrides, for ``--help``.
        complaint: What is wrong with an argument that is no override; None if it is a name.

    Returns:
        The flags as booleans, ``overrides`` and ``names``.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    kinds = f"{named} or OPTION=VALUE" if named else "OPTION=VALUE"
    parser.add_argument("given", nargs="*", metavar=kinds, help="OPTION=VALUE: a Hydra override for every run")
    for name, what in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    found = parser.parse_args()
    found.overrides = [text for text in found.given if "=" in text]
    found.names = [text for text in found.given if "=" not in text]
    for text in found.names:
        wrong = complaint(text)
        if wrong:
            parser.error(wrong)
    if getattr(found, _PLOT, False) and found.given:
        parser.error(f"--{_PLOT} trains nothing: leave out {found.given[0]}")
    return found


def train(folder: Path, config: str, overrides: Sequence[str]) -> int:
    """Run ``hp-muon train`` to its end.

    Args:
        folder: The recipe's, which holds its config.
        config: Its name.
        overrides: Of this run.

    Returns:
        Its exit code; 130 after Ctrl-C whatever the command made of it.
    """
    module = ["-m", "hp_muon_plugin.cli.main", "train", "--config-dir", str(folder), "--config-name", config]
    command = [sys.executable, *module, *overrides]
    print(f"\n$ hp-muon {' '.join(command[3:])}", flush=True)
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
