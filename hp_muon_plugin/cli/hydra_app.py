"""Running one of our commands as a Hydra application, with our error messages and exit codes."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from hp_muon_plugin.cli.explain import explain
from hp_muon_plugin.cli.interrupts import raise_if_interrupted
from hp_muon_plugin.cli.sweep_file import sweep_file
from hp_muon_plugin.config.store import register_schemas
from hp_muon_plugin.errors import HpMuonError
from hp_muon_plugin.megatron.versions import parse_version
from hp_muon_plugin.train.environment import speaks
from hp_muon_plugin.train.launch import INTERRUPTED_EXIT
from hp_muon_plugin.train.run_folder import unwritable_folder
from hp_muon_plugin.train.worker import FAILURE_EXIT, USAGE_EXIT, is_mistake

_TAKE_A_VALUE = frozenset(
    [
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
        "--experimental-rerun",
        "--info",
        "-i",
    ]
)


_SILENT_RANK_WAITS_S = 20.0
"""The launcher ends a waiting rank as soon as rank 0 has failed; only without one is the time used up."""


class _Through(BaseException):
    """Ends a sweep. After an ``Exception`` Hydra says so in its own words and goes on with the next job.

    Attributes:
        error: What a job raised that is no message for the user, or None after an interruption.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(error)
        self.error = error


class _Job:
    """The application as Hydra calls it, once for each job.

    Attributes:
        codes: Exit codes of the jobs.
    """

    def __init__(self, task: Callable[[DictConfig], int]) -> None:
        self.codes: list[int] = []
        self._task = task

    def __call__(self, config: DictConfig) -> None:
        raise_if_interrupted()
        try:
            self.codes.append(self._task(config))
        except Exception as error:
            raise_if_interrupted()  # it may be what a library made of the interruption
            if not isinstance(error, HpMuonError):
                raise _Through(error) from error
            code = USAGE_EXIT if is_mistake(error) else FAILURE_EXIT
            complain(str(error), code)
            self.codes.append(code)
        if self.codes[-1] == INTERRUPTED_EXIT:
            raise _Through


def run_hydra(task: Callable[[DictConfig], int], config_name: str, overrides: list[str]) -> int:
    """Compose a configuration from our tree and call ``task`` with it.

    Args:
        task: Gets the composed configuration, returns an exit code; 130 ends a sweep.
        config_name: Primary config in ``conf/``.
        overrides: Command-line arguments after the command, Hydra's own flags included.

    Returns:
        Exit code: 2 for a user's mistake, else what ``task`` returned (the largest, with ``-m``).
    """
    register_schemas()
    job = _Job(task)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["hp-muon", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors through to us instead of printing them
    try:
        with sweep_file.watched():
            hydra.main(**_hydra_options(config_name))(_function(job))()
    except _Through as through:
        if through.error is not None:
            raise through.error from None
        return INTERRUPTED_EXIT
    except Exception as error:
        raise_if_interrupted()
        if before[1] == "1":
            raise  # the user asked for Hydra's traceback
        complain(_composition_message(error, overrides))
        return USAGE_EXIT
    finally:
        sys.argv = before[0]
        _restore("HYDRA_FULL_ERROR", before[1])
    return max(job.codes, default=0)


def flags_first(arguments: list[str]) -> list[str]:
    """Hydra's flags before the overrides: behind some of them it takes no others.

    Args:
        arguments: Flags and overrides in any order.

    Returns:
        The same, each flag with its value.
    """
    flags: list[str] = []
    overrides: list[str] = []
    previous = ""
    for argument in arguments:
        is_flag = argument.startswith("-") or (previous in _TAKE_A_VALUE and "=" not in argument)
        (flags if is_flag else overrides).append(argument)
        previous = argument
    return [*flags, *overrides]


def complain(message: str, code: int = USAGE_EXIT) -> None:
    """Print an error that all ranks find alike, once for the job: under torchrun only rank 0 speaks.

    The other ranks wait for it. The launcher ends all ranks when the first one fails, and that must not be one that
    says nothing while rank 0 has not got so far. A rank that the launcher ends so has failed, too, and exits like one.

    Args:
        message: The message.
        code: What the process exits with because of it.
    """
    if speaks():
        say(message)
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher may repeat itself
        sys.exit(code)

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    time.sleep(_SILENT_RANK_WAITS_S)
    if is_main:
        signal.signal(signal.SIGTERM, before)


def say(message: str) -> None:
    """Print an error, whichever rank this is.

    Args:
        message: The message.
    """
    print(f"hp-muon: {message}", file=sys.stderr, flush=True)


def _hydra_options(config_name: str) -> dict[str, Any]:
    return {
        "config_path": "pkg://hp_muon_plugin.conf",
        "config_name": config_name,
        **hydra_version_options(),
    }


def hydra_version_options() -> dict[str, Any]:
    """What the installed Hydra wants to be told of its version: 1.4 warns where it is given, 1.3 where it is not."""
    is_old = parse_version(metadata.version("hydra-core")) < parse_version("1.4")
    return {"version_base": "1.3"} if is_old else {}


def _function(job: _Job) -> Callable[[DictConfig], None]:
    """Hydra asks a function for its module."""

    def function(config: DictConfig) -> None:
        job(config)

    function.__module__, function.__qualname__ = __name__, "job"
    return function


def _composition_message(error: Exception, overrides: list[str]) -> str:
    """Hydra makes the run's folder itself; whatever else it raises comes from what the user wrote."""
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return str(unwritable_folder(error.filename or "", error))
    return explain(error, overrides)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
