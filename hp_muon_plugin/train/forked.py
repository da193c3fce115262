"""Ranks that share one import: the launcher's side of ``train/nursery.py``.

On a CPU most of a rank's start, in time and in memory, is the import of torch and megatron-core. There one process
imports them, and ranks are forked from it. The launcher itself imports nothing, so that it stays small, and hears
Ctrl-C at any time. In any doubt each rank is a process that imports for itself, as everywhere else.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.platform.signs import signs_of_accelerator
from hp_muon_plugin.train.environment import Start, chosen_start, python_module

_MODULE = "hp_muon_plugin.train.nursery"
_POLL_S = 0.1
_GONE_S = 5.0
"""How long ranks may take to be gone once they were killed."""


class RankNotStarted(Exception):
    """A rank could not be started.

    Attributes:
        rank: Which.
        why: What the system said.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


def may_fork(platform: PlatformName, *, num_ranks: int, threads: int) -> bool:
    """Whether ranks may share one import: on Linux, and where neither a device nor a thread can be lost by a fork.

    Args:
        platform: As the user chose it.
        num_ranks: Ranks; one alone has nobody to share with.
        threads: CPU threads of each. With several, libraries start theirs while they are imported.

    Returns:
        True if so.

    Raises:
        ConfigError: If ``HP_MUON_START`` has a value that means nothing.
    """
    return (
        chosen_start(os.environ) is Start.auto
        and sys.platform == "linux"
        and num_ranks > 1
        and threads == 1
        and platform in (PlatformName.auto, PlatformName.cpu)
        and not signs_of_accelerator()
    )


def killed_by(number: int) -> str:
    """How to say that a signal ended a process.

    Args:
        number: The signal.

    Returns:
        The end of a sentence.
    """
    name = signal.Signals(number).name
    return f"was killed by {name}{' (often: out of memory)' if number == signal.SIGKILL else ''}"


class ForkedRank:
    """A rank, with what the launcher needs of ``subprocess.Popen``.

    Attributes:
        pid: Its process id, and that of its session.
        returncode: How it ended, as Popen says it; None while it runs.
    """

    def __init__(self, pid: int, nursery: "Nursery") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """How it ended, or None."""
        self._nursery.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            How it ended.

        Raises:
            subprocess.TimeoutExpired: If it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = _POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired([_MODULE], timeout)
            self._nursery.listen(min(left, _POLL_S))
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def end_with_nursery(self) -> None:
        """The system kills it where it has not ended by itself."""
        self.kill()
        if self.returncode is None:
            self.returncode = -signal.SIGKILL

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Nursery:
    """The process that imports and forks. As a context manager it leaves nothing behind.

    It tells one thing a line: ``{"rank": 0, "pid": 17}`` of a rank that runs, ``{"pid": 17, "code": 0}`` of one that
    has ended, ``{"rank": 1, "error": "..."}`` of one that could not be forked, ``{"refused": "..."}`` if it forks none.

    Args:
        arguments: Module and arguments.
        folder: Where ranks leave logs.
        variables: More environment variables.
        num_ranks: Ranks.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], num_ranks: int) -> None:
        self._ranks: list[ForkedRank] = []
        self._num_ranks = num_ranks
        self._unread = b""
        self._is_refused = False
        self._error: RankNotStarted | None = None
        try:
            self._pipe, theirs = os.pipe()
        except OSError as error:
            raise RankNotStarted(0, str(error)) from None
        command = python_module(_MODULE, str(theirs), str(num_ranks), str(folder), *arguments)
        try:
            self._process = subprocess.Popen(
                command, env={**os.environ, **variables}, start_new_session=True, pass_fds=[theirs]
            )
        except OSError as error:
            os.close(self._pipe)
            raise RankNotStarted(0, str(error)) from None
        finally:
            os.close(theirs)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        deadline = time.monotonic() + _GONE_S
        while self.listen(_POLL_S) and time.monotonic() < deadline:  # of ranks that nobody has heard of yet
            pass
        os.close(self._pipe)

    def fork_ranks(self, processes: list[Any], is_stopped: Callable[[], bool]) -> bool:
        """Add each rank to ``processes`` as soon as it runs, so that all of them are ended.

        Args:
            processes: Receives ranks.
            is_stopped: Whether to leave off.

        Returns:
            False if no rank was started, because processes of their own are wanted.

        Raises:
            RankNotStarted: If one could not be.
        """
        while len(self._ranks) < self._num_ranks and not is_stopped():
            is_open = self.listen(_POLL_S)
            processes += self._ranks[len(processes) :]
            if self._is_refused:
                self._end()
                return False
            if self._error is not None:
                raise self._error
            if not is_open and len(self._ranks) < self._num_ranks:
                return self._ended_early()
        return True

    def listen(self, timeout_s: float) -> bool:
        """Take in what has been told.

        Args:
            timeout_s: How long to wait for a line.

        Returns:
            False if the process has gone; ranks that had not ended have been killed with it.
        """
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if not poll.poll(1e3 * timeout_s):
            return True
        data = os.read(self._pipe, 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if not data:
            for rank in self._ranks:
                rank.end_with_nursery()
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            self._is_refused = True
        elif "error" in message:
            self._error = RankNotStarted(message["rank"], message["error"])
        elif "code" in message:
            next(rank for rank in self._ranks if rank.pid == message["pid"]).returncode = message["code"]
        else:
            self._ranks.append(ForkedRank(message["pid"], self))

    def _end(self) -> int:
        """Kill it, and what its imports have started, as long as its process id cannot be anybody else's.

        Returns:
            How it ended.
        """
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _ended_early(self) -> bool:
        """An import that ends the process is tried again by a rank, which reports it; a signal is told at once."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        code = self._end()
        if code >= 0 and not self._ranks:
            return False
        told = killed_by(-code) if code < 0 else f"ended with exit code {code}"
        raise RankNotStarted(len(self._ranks), f"what imports for all ranks {told}")
