"""A lane of ``hp-muon bench optimizer``: the ranks of one interpreter, and the line to each of them."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hp_muon_plugin.bench import opt_boot
from hp_muon_plugin.bench.fsdp import Supernodes
from hp_muon_plugin.bench.opt_rank import LanePlan
from hp_muon_plugin.train.environment import INIT_METHOD, python_module
from hp_muon_plugin.train.launch import Interrupted, Stop
from hp_muon_plugin.train.rank_main import LAUNCHER

_MODULE = "hp_muon_plugin.bench.opt_rank"
_POLL_S = 0.2
_START_S = 120.0
_LOG_CHARACTERS = 300
_TESTBED_S = 3600.0


class LaneError(Exception):
    """Ranks of a lane failed, or do not answer; the lane is of no use any more."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all lanes share.

    Attributes:
        num_ranks: Ranks of each lane.
        replicas: Size of the replicate axis.
        timeout_s: How long a rank may take for one line.
        stop: Set by Ctrl-C.
        testbed: Nodes to run on.
    """

    num_ranks: int
    replicas: int
    timeout_s: float
    stop: Stop
    testbed: Supernodes | None = None


@dataclass(slots=True)
class Lane:
    """Ranks of one interpreter; start it, ask it, stop it.

    Attributes:
        python: The interpreter.
        job: What all lanes share.
        folder: For logs, one for each lane; made if needed.
        environment: More variables of the ranks.
    """

    python: str
    job: Job
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _lines: list[socket.socket] = field(default_factory=list)
    _unread: dict[int, bytes] = field(default_factory=dict)
    _starts: int = 0

    def start(self) -> None:
        """Start the ranks, and wait until each has called.

        Raises:
            LaneError: If one ends, or does not call in time.
            Interrupted: After Ctrl-C.
        """
        self._starts += 1
        here = self.folder / str(self._starts)
        here.mkdir(parents=True)
        address = here / "line"
        job = self.job
        plan = LanePlan(str(address), job.replicas, job.testbed.nodes if job.testbed else 0, job.timeout_s)
        (here / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(address))
            door.listen(job.num_ranks)
            door.settimeout(_POLL_S)
            self._launch(here)
            self._await_calls(door)

    def ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Have every rank carry out a line.

        Args:
            message: The line.

        Returns:
            Answers by rank.

        Raises:
            LaneError: If a rank fails or does not answer in time. The lane has been stopped.
            Interrupted: After Ctrl-C.
        """
        data = json.dumps(message).encode() + b"\n"
        try:
            for line in self._lines:
                line.sendall(data)
        except OSError as error:
            raise self._failed("a rank has gone") from error
        answers = self._answers()
        errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if errors:
            raise self._failed(f"rank {min(errors)}: {errors[min(errors)]}")
        return [answers[rank] for rank in range(self.job.num_ranks)]

    def stop(self) -> None:
        """End every rank. Nothing happens if none runs."""
        for line in self._lines:
            line.close()
        self._lines.clear()
        self._unread.clear()
        if self.job.testbed is not None:
            for process in self._processes:
                process.send_signal(signal.SIGINT)
        for process in self._processes:
            try:
                process.wait(1.0 if self.job.testbed is None else 30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _launch(self, here: Path) -> None:
        job, bed = self.job, self.job.testbed
        is_here = self.python == sys.executable
        module = ["-m", _MODULE] if bed is not None else python_module(_MODULE)[1:]
        program = module if is_here else [opt_boot.__file__]
        if bed is not None:
            options: dict[str, Any] = {"--nodes": bed.nodes, "--ranks-per-node": job.num_ranks // bed.nodes}
            options |= {"--rate": bed.rate, "--timeout": _TESTBED_S, "--python": self.python, "--log-dir": here}
            command = [str(bed.path), *(str(word) for pair in options.items() for word in pair), "--", *program]
            self._spawn([*command, str(here / "plan.json")], {}, here / "testbed.log")
            return
        for rank in range(job.num_ranks):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.num_ranks, "LOCAL_WORLD_SIZE": job.num_ranks}
            variables = {name: str(value) for name, value in places.items()}
            variables |= {INIT_METHOD: f"file://{here / 'store'}", LAUNCHER: str(os.getpid()), "OMP_NUM_THREADS": "1"}
            self._spawn([self.python, *program, str(here / "plan.json")], variables, here / f"rank{rank}.log")

    def _spawn(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        environment = {**os.environ, **variables, **self.environment}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)

    def _await_calls(self, door: socket.socket) -> None:
        deadline = time.monotonic() + _START_S
        called: list[socket.socket] = []
        while len(called) < self.job.num_ranks:
            self._look_after(deadline, "did not start in time")
            try:
                called.append(door.accept()[0])
            except TimeoutError:
                continue
        self._lines = called
        ranks = {answer["rank"]: line for line, answer in self._read_all().items()}
        self._lines = [ranks[rank] for rank in range(self.job.num_ranks)]

    def _answers(self) -> dict[int, dict[str, Any]]:
        return {self._lines.index(line): answer for line, answer in self._read_all().items()}

    def _read_all(self) -> dict[socket.socket, dict[str, Any]]:
        """One answer of each rank; of a rank that failed at once, without those that wait for it."""
        deadline = time.monotonic() + self.job.timeout_s
        found: dict[socket.socket, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for known in self._lines:
                selector.register(known, selectors.EVENT_READ)
            while len(found) < len(self._lines):
                self._look_after(deadline, "did not answer in time: it hangs")
                for key, _ in selector.select(_POLL_S):
                    line: Any = key.fileobj
                    answer = self._read(line)
                    if answer is not None:
                        found[line] = answer
                        selector.unregister(line)
                        if "error" in answer:
                            return found
        return found

    def _read(self, line: socket.socket) -> dict[str, Any] | None:
        try:
            data = line.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise self._failed("a rank ended without a word")
        text = self._unread.get(id(line), b"") + data
        head, newline, tail = text.partition(b"\n")
        self._unread[id(line)] = tail if newline else text
        return dict(json.loads(head)) if newline else None

    def _look_after(self, deadline: float, complaint: str) -> None:
        if self.job.stop.is_set:
            self.stop()
            raise Interrupted
        if any(process.poll() for process in self._processes):
            raise self._failed("a rank ended")
        if time.monotonic() > deadline:
            raise self._failed(complaint)

    def _failed(self, why: str) -> LaneError:
        """Stop the lane, and say what its ranks wrote last."""
        logs = sorted((self.folder / str(self._starts)).glob("*.log"))
        self.stop()
        told = next((text for text in (_last_line(log) for log in logs) if text), "")
        return LaneError(why if not told or told in why else f"{why}: {told}"[:_LOG_CHARACTERS])


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
