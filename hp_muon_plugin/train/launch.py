"""Starting the ranks of a run on this machine, and ending all of them when one fails.

Under torchrun this is not used. torch is not imported here: the launcher costs nothing.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.environment import INIT_METHOD, python_module
from hp_muon_plugin.train.forked import ForkedRank, Nursery, RankNotStarted, killed_by, may_fork
from hp_muon_plugin.train.rank_main import LAUNCHER
from hp_muon_plugin.train.reports import read_reports
from hp_muon_plugin.train.run_folder import CONFIG, claimed, log_path, write_config
from hp_muon_plugin.train.worker import FAILURE_EXIT, SETTLE_S, USAGE_EXIT, Failure

INTERRUPTED_EXIT = 130
_POLL_S = 0.1
_GRACE_S = 3.0
"""How long a rank may take to end after SIGTERM."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Processes = list["subprocess.Popen[bytes] | ForkedRank"]


@dataclass(frozen=True, slots=True)
class _Job:
    """What ranks are to do.

    Attributes:
        arguments: Their module and its arguments.
        folder: For their logs.
        variables: More environment variables of all ranks.
        num_ranks: Ranks.
    """

    arguments: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    num_ranks: int


class Interrupted(Exception):
    """The user pressed Ctrl-C, or the launcher got SIGTERM or SIGHUP."""


class Stop:
    """Takes Ctrl-C, SIGTERM and SIGHUP while ranks run: a flag, so that nothing is cut off half-way.

    A signal that was ignored before, as SIGHUP under nohup, stays so. What is asked for a second
    time runs ``hurry``.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.hurry: Callable[[], None] = lambda: None
        self._is_raising = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        for number in _STOPPING:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it a signal ends what goes on: this process computes, and would not look at the flag for long.

        Raises:
            Interrupted: When a signal comes, or has come.
        """
        self._is_raising = True
        try:
            if self.is_set:
                raise Interrupted
            yield
        finally:
            self._is_raising = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            self.hurry()
        self.is_set = True
        if self._is_raising:
            self._is_raising = False
            raise Interrupted


def launch_ranks(config: Train, folder: Path, *, num_ranks: int) -> Failure | None:
    """Run all ranks of a configuration to their end.

    Rank 0 shows its output; the others write ``rank{N}.log`` into the run's folder.

    Args:
        config: Checked options.
        folder: The run's folder.
        num_ranks: Ranks to start.

    Returns:
        None if all ended well, else the first failure; then every rank has ended.

    Raises:
        Interrupted: After Ctrl-C, SIGTERM or SIGHUP; every rank has ended.
        ConfigError: If the folder is another run's, or cannot be written to.
    """
    with claimed(folder):
        write_config(config, folder)
        arguments = ["hp_muon_plugin.train.rank_main", str(folder / CONFIG), str(folder)]
        options = config.checkpoint
        return launch_module(
            arguments,
            folder,
            num_ranks=num_ranks,
            threads=config.topology.threads,
            platform=config.platform.name,
            grace_s=options.interrupt_s if options.on_interrupt else None,
        )


def launch_module(
    arguments: Sequence[str],
    folder: Path,
    *,
    num_ranks: int,
    threads: int,
    platform: PlatformName,
    grace_s: float | None = None,
) -> Failure | None:
    """Run a module on several ranks to their end.

    Its ``main()`` should end with its launcher, see :func:`~hp_muon_plugin.train.rank_main.die_with`, and
    report failures, see :func:`~hp_muon_plugin.train.worker.run_and_report`. Rank 0 shows its output;
    the others write ``rank{N}.log`` into the folder. Where ranks may be forked, the module is imported once for all
    of them, and its ``import_ahead()`` is called, if it has one.

    Args:
        arguments: The module, as ``python -m`` takes it, and its arguments.
        folder: Where ranks leave logs and reports; there are none yet.
        num_ranks: Ranks to start.
        threads: CPU threads of each.
        platform: Where they run.
        grace_s: How long ranks may take to end after Ctrl-C, SIGTERM or SIGHUP, as to save a checkpoint;
            None: 3 seconds.

    Returns:
        None if all ended well, else the first failure; then every rank has ended.

    Raises:
        Interrupted: After Ctrl-C, SIGTERM or SIGHUP; every rank has ended.
    """
    processes: _Processes = []
    is_forked = may_fork(platform, num_ranks=num_ranks, threads=threads)
    try:
        place = tempfile.TemporaryDirectory(prefix="hp-muon-", ignore_cleanup_errors=True)
    except OSError as error:  # a disk that is full, a TMPDIR that is not there, too many open files
        return Failure(0, f"could not be started: {error}", FAILURE_EXIT, None)
    with place as meeting, Stop() as stop, contextlib.ExitStack() as nurseries:
        variables = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONFAULTHANDLER": "1",
            INIT_METHOD: f"file://{Path(meeting) / 'store'}",
            LAUNCHER: str(os.getpid()),
        }
        job = _Job(arguments, folder, variables, num_ranks)
        try:
            if not (is_forked and _fork_all(processes, job, stop, nurseries)):
                _start_all(processes, job, stop)
            failure = _watch(processes, (folder, Path(meeting)), stop)
        except RankNotStarted as error:
            failure = Failure(error.rank, f"could not be started: {error.why}", FAILURE_EXIT, None)
        finally:
            stop.hurry = lambda: _kill(processes)
            _end(processes, grace_s if stop.is_set and grace_s is not None else _GRACE_S)
    if stop.is_set:
        raise Interrupted
    return failure


def _fork_all(processes: _Processes, job: _Job, stop: Stop, nurseries: contextlib.ExitStack) -> bool:
    """Like :func:`_start_all`; False if ranks cannot share what they import."""
    nursery = nurseries.enter_context(Nursery(job.arguments, job.folder, job.variables, job.num_ranks))
    return nursery.fork_ranks(processes, lambda: stop.is_set)


def _start_all(processes: _Processes, job: _Job, stop: Stop) -> None:
    """Add one process per rank to ``processes``, each as soon as it runs, so that all of them are ended."""
    for rank in range(job.num_ranks):
        if stop.is_set:
            break
        try:
            processes.append(_start(rank, job))
        except OSError as error:  # the system starts no more processes, or its disk is full
            raise RankNotStarted(rank, str(error)) from None


def _start(rank: int, job: _Job) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **job.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = python_module(*job.arguments)
    options: dict[str, Any] = {"env": environment, "start_new_session": True}
    if rank == 0:
        return subprocess.Popen(command, **options)
    with log_path(job.folder, rank).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)


def _watch(processes: _Processes, folders: Sequence[Path], stop: Stop) -> Failure | None:
    while not stop.is_set:
        codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(SETTLE_S)
            return _first_failure([process.poll() for process in processes], folders)
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)
    return None


def _first_failure(codes: list[int | None], folders: Sequence[Path]) -> Failure:
    folder = folders[0]
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:  # it could not report; what the others report is the consequence
        rank = killed[0]
        told = killed_by(-codes[rank])  # type: ignore[operator]
        return Failure(rank, told, FAILURE_EXIT, _log(folder, rank))
    reported = reported_failure(*folders, num_ranks=len(codes))
    if reported is not None:
        return reported
    rank = next(rank for rank, code in enumerate(codes) if code)
    return Failure(rank, f"ended with exit code {codes[rank]} and no message", FAILURE_EXIT, _log(folder, rank))


def reported_failure(folder: Path, *others: Path, num_ranks: int) -> Failure | None:
    """The first failure that a rank reported.

    Args:
        folder: Where ranks leave logs and reports.
        *others: Where else they leave reports.
        num_ranks: Ranks.

    Returns:
        The failure; None if no rank reported one.
    """
    reports = read_reports(folder, *others, num_ranks=num_ranks)
    if not reports:
        return None
    first = min(reports, key=lambda report: float(report["time"]))
    rank = first["rank"]
    return Failure(rank, first["message"], USAGE_EXIT if first["is_usage"] else FAILURE_EXIT, _log(folder, rank))


def _log(folder: Path, rank: int) -> Path | None:
    path = log_path(folder, rank)
    return path if path.is_file() and path.stat().st_size else None


def _end(processes: _Processes, grace_s: float) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _kill(processes)


def _kill(processes: _Processes) -> None:
    """Kill ranks, and what they had started themselves, such as writers of checkpoints."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
