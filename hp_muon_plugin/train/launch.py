"""Starting the ranks of a run on this machine, and ending all of them when one fails.

Under torchrun this is not used. torch is not imported here: the launcher costs nothing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hp_muon_plugin.config.train_options import save_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.worker import FAILURE_EXIT, USAGE_EXIT, error_path, log_path

INTERRUPTED_EXIT = 130
_POLL_S = 0.1
_SETTLE_S = 1.0
"""How long after the first failure other ranks may report: the cause is the earliest report."""
_GRACE_S = 3.0
"""How long a rank may take to end after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ended early.

    Attributes:
        rank: The rank that failed first.
        message: What it said.
        exit_code: 2 for a user's mistake, 1 for anything else.
        log: File with its traceback, or None if it left none.
    """

    rank: int
    message: str
    exit_code: int
    log: Path | None


class Interrupted(Exception):
    """The user pressed Ctrl-C, or the launcher got SIGTERM."""


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
        Interrupted: After Ctrl-C or SIGTERM; every rank has ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        error_path(folder, rank).unlink(missing_ok=True)
        log_path(folder, rank).unlink(missing_ok=True)
    config_path = folder / "config.yaml"
    save_train(config, config_path)
    store = folder / f"rendezvous.{os.getpid()}"
    store.unlink(missing_ok=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [_start(rank, num_ranks, config, config_path, folder, store) for rank in range(num_ranks)]
        return _watch(processes, folder)
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        _end(processes)
        store.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _start(
    rank: int, num_ranks: int, config: Train, config_path: Path, folder: Path, store: Path
) -> "subprocess.Popen[bytes]":
    environment = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        HP_MUON_INIT_METHOD=f"file://{store.resolve()}",
        OMP_NUM_THREADS=str(config.topology.threads),
        PYTHONFAULTHANDLER="1",
    )
    command = [sys.executable, "-m", "hp_muon_plugin.train.worker", str(config_path), str(folder)]
    options: dict[str, Any] = {"env": environment, "start_new_session": True}
    if rank == 0:
        return subprocess.Popen(command, **options)
    with log_path(folder, rank).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)


def _watch(processes: list["subprocess.Popen[bytes]"], folder: Path) -> Failure | None:
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            time.sleep(_SETTLE_S)
            return _first_failure([process.poll() for process in processes], folder)
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)


def _first_failure(codes: list[int | None], folder: Path) -> Failure:
    reports = []
    for rank in range(len(codes)):
        path = error_path(folder, rank)
        if path.is_file():
            reports.append(json.loads(path.read_text(encoding="utf-8")))
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:  # it could not report; what the others report is the consequence
        rank = killed[0]
        name = signal.Signals(-codes[rank]).name  # type: ignore[operator]
        return Failure(rank, f"was killed by {name}{_memory_hint(name)}", FAILURE_EXIT, _log(folder, rank))
    if reports:
        first = min(reports, key=lambda report: report["time"])
        rank = first["rank"]
        return Failure(rank, first["message"], USAGE_EXIT if first["is_usage"] else FAILURE_EXIT, _log(folder, rank))
    rank = next(rank for rank, code in enumerate(codes) if code)
    return Failure(rank, f"ended with exit code {codes[rank]} and no message", FAILURE_EXIT, _log(folder, rank))


def _log(folder: Path, rank: int) -> Path | None:
    path = log_path(folder, rank)
    return path if path.is_file() and path.stat().st_size else None


def _memory_hint(name: str) -> str:
    return " (often: out of memory)" if name == "SIGKILL" else ""


def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in processes:  # what a rank had started itself, such as a writer of checkpoints
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
