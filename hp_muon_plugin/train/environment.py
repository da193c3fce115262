"""What torchrun, or whoever starts the ranks, says in the environment."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hp_muon_plugin.errors import ConfigError, raise_all

INIT_METHOD = "HP_MUON_INIT_METHOD"
"""Set by our own launcher: how its ranks find each other."""

START = "HP_MUON_START"
"""May be set by the user: how our launcher starts ranks, see :class:`Start`."""

_FIX = "start the ranks with torchrun, or unset RANK and let hp-muon start them (topology.ranks=...)"


class Start(StrEnum):
    """How our launcher starts ranks."""

    auto = "auto"
    """On a CPU forked from one process that imports for all of them, elsewhere as ``fresh``."""
    fresh = "fresh"
    """Each a new process, which imports for itself."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the job.

    Attributes:
        rank: Global rank.
        world_size: Ranks.
        local_rank: Place on this machine.
        init_method: How ranks find each other, as torch.distributed takes it.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read what :func:`check_environment` accepts."""
        get = os.environ.get
        rank, world_size = int(get("RANK", "0")), int(get("WORLD_SIZE", "1"))
        return cls(rank, world_size, int(get("LOCAL_RANK", str(rank))), get(INIT_METHOD, "env://"))


def python_module(*arguments: str) -> list[str]:
    """The command that runs a module in this interpreter, as in ``python -m``, with what is importable here.

    ``-m`` puts the working folder before everything else on the path, so that a file of the user's that happens to be
    called ``random.py`` would be imported in the place of Python's own, by ranks and not by the command.

    Args:
        *arguments: The module and its arguments.
    """
    here = Path.cwd()
    is_searched = any(Path(entry or ".").absolute() == here for entry in sys.path)
    return [sys.executable, *([] if is_searched else ["-P"]), "-m", *arguments]


def is_rank() -> bool:
    """Whether somebody started this process as one rank of a job."""
    return "RANK" in os.environ


def speaks() -> bool:
    """Whether this process tells the user what all ranks find alike: rank 0, or no rank at all."""
    rank = os.environ.get("RANK", "0")
    return not _is_count(rank) or int(rank) == 0


def chosen_start(variables: Mapping[str, str]) -> Start:
    """How ranks are to be started.

    Args:
        variables: The environment.

    Returns:
        What ``HP_MUON_START`` says; ``auto`` if it says nothing.

    Raises:
        ConfigError: If it says something else.
    """
    value = variables.get(START) or Start.auto
    if value not in list(Start):
        raise ConfigError(START, value, "is no way to start ranks", f"unset it, or choose among {', '.join(Start)}")
    return Start(value)


def check_environment(variables: Mapping[str, str]) -> None:
    """Check the variables of a process that was started as a rank.

    Args:
        variables: The environment; ``RANK`` is there.

    Raises:
        ConfigError: If a variable is missing or is no number.
        ConfigErrors: If several are.
    """
    errors = []
    wanted = ["RANK", "WORLD_SIZE", *(["LOCAL_RANK"] if "LOCAL_RANK" in variables else [])]
    if INIT_METHOD not in variables:
        wanted += ["MASTER_ADDR", "MASTER_PORT"]
    for name in wanted:
        value = variables.get(name)
        if value is None:
            errors.append(ConfigError(name, "", "is not set, and RANK says that this process is a rank", _FIX))
        elif name != "MASTER_ADDR" and not _is_count(value):
            errors.append(ConfigError(name, value, "must be a number that is not negative", _FIX))
    raise_all(errors)
    rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError("RANK", rank, f"must be less than WORLD_SIZE={world_size}", _FIX)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()
