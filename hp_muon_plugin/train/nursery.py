"""What our launcher starts where ranks share one import: ``python -m hp_muon_plugin.train.nursery ...``.

This process imports what every rank needs, forks the ranks, and then only waits: it tells the launcher when a rank
ends, and how. A forked rank is left with nothing that a process of its own would not have: own session, signals,
standard output and error, environment, random numbers. Like ``rank_main`` this module imports nothing but the
standard library before it has asked to end with the launcher.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from hp_muon_plugin.train.rank_main import LAUNCHER, die_with

IMPORT_AHEAD = "import_ahead"
"""A module may have a function of this name, which imports what its ranks would import after they have started."""
_NAME_PROCESS = 15  # PR_SET_NAME of Linux's prctl
_THREADS = Path("/proc/self/task")
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class _Launcher:
    """The one that asked for ranks, at the other end of a pipe; what it is told see ``train/forked.py``."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, **message: Any) -> None:
        os.write(self._pipe, json.dumps(message).encode() + b"\n")

    def leave(self) -> None:
        os.close(self._pipe)


def main() -> None:
    """Entry point: pipe to the launcher, number of ranks, folder, module, arguments of the module."""
    die_with(int(os.environ[LAUNCHER]))
    pipe, num_ranks, folder, name, *arguments = sys.argv[1:]
    os.set_inheritable(int(pipe), False)  # the launcher waits until nobody holds it any more
    launcher = _Launcher(int(pipe))
    gc.disable()  # what is imported is not garbage, and what is never looked at stays shared
    try:
        module = _imported(name)
    except Exception as error:  # a rank of its own meets it again, and reports it
        launcher.tell(refused=f"{type(error).__name__}: {error}")
        return
    why = why_not_to_fork()
    if why is not None:
        launcher.tell(refused=why)
        return
    gc.freeze()
    if _fork_ranks(launcher, int(num_ranks), Path(folder)):
        gc.enable()
        sys.argv = [str(module.__file__), *arguments]
        module.main()
        return
    _wait(launcher)
    os._exit(0)


def why_not_to_fork() -> str | None:
    """What this process has that a forked one cannot have: threads, processes of its own, or a device.

    Returns:
        A reason; None if a forked process is as good as a new one.
    """
    threads = max(threading.active_count(), len(os.listdir(_THREADS)))
    if threads > 1:
        return f"{threads} threads run"
    if _has_children():
        return "an import has started a process"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    return None


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _imported(name: str) -> ModuleType:
    module = importlib.import_module(name)
    getattr(module, IMPORT_AHEAD, lambda: None)()
    return module


def _fork_ranks(launcher: _Launcher, num_ranks: int, folder: Path) -> bool:
    """Fork ranks, each in a session of its own by the time that the launcher hears of it.

    Returns:
        True in a rank, False here.
    """
    from hp_muon_plugin.train.run_folder import log_path

    parent = os.getpid()
    for rank in range(num_ranks):
        _flush()
        try:
            output = os.open(log_path(folder, rank), _WRITE) if rank else None
            waiting, ready = os.pipe()
            pid = os.fork()
        except OSError as error:  # the system starts no more processes, or its disk is full
            launcher.tell(rank=rank, error=str(error))
            return False
        if pid == 0:
            launcher.leave()
            os.close(waiting)
            _become(rank, parent, output)
            os.close(ready)
            return True
        os.close(ready)
        os.read(waiting, 1)  # returns when the rank has closed its end, or has ended
        os.close(waiting)
        if output is not None:
            os.close(output)
        launcher.tell(rank=rank, pid=pid)
    return False


def _become(rank: int, parent: int, output: int | None) -> None:
    """Be a rank, as if the launcher had started it."""
    os.setsid()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER: str(parent)})
    die_with(parent)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_NAME_PROCESS, f"hp-muon rank {rank}".encode())  # 15 characters are kept
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _flush() -> None:
    """What is written but not out yet must not be written by a rank as well."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _wait(launcher: _Launcher) -> None:
    with contextlib.suppress(ChildProcessError):  # no rank is left
        while True:
            pid, status = os.waitpid(-1, 0)
            launcher.tell(pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
