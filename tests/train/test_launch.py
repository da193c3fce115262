"""The launcher ends what it has started, whatever happens while it starts or ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train import launch
from hp_muon_plugin.train.environment import START
from hp_muon_plugin.train.launch import Interrupted, launch_ranks
from hp_muon_plugin.train.rank_main import LAUNCHER

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
]


class Started(list["subprocess.Popen[bytes]"]):
    """Stands for the launcher's way of starting a rank."""

    def __init__(self, commands: list[list[str] | None]) -> None:
        super().__init__()
        self._commands = commands

    def __call__(self, rank: int, *_: Any) -> "subprocess.Popen[bytes]":
        command = self._commands[rank]
        if command is None:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        if command is STUBBORN:
            assert process.stdout is not None
            process.stdout.readline()
        self.append(process)
        return process


def started(monkeypatch: pytest.MonkeyPatch, commands: list[list[str] | None]) -> Started:
    ranks = Started(commands)
    monkeypatch.setenv(START, "fresh")
    monkeypatch.setattr(launch, "_start", ranks)
    return ranks


def test_ranks_are_ended_where_the_next_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list comprehension dropped the ranks that ran already."""
    ranks = started(monkeypatch, [SLEEP, SLEEP, None])
    failure = launch_ranks(Train(optimizer=HpMuon()), tmp_path, num_ranks=3)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (2, 1)
    assert failure.message == "could not be started: [Errno 11] Resource temporarily unavailable"
    assert [process.poll() for process in ranks] == [-signal.SIGTERM] * 2


def test_an_interrupt_while_starting_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = started(monkeypatch, [SLEEP, SLEEP])
    start = launch._start

    def interrupted(rank: int, *rest: Any) -> "subprocess.Popen[bytes]":
        process = start(rank, *rest)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(launch, "_start", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted):
        launch_ranks(Train(optimizer=HpMuon()), tmp_path, num_ranks=2)
    assert [process.poll() for process in ranks] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback, and the ranks stayed."""
    ranks = started(monkeypatch, [STUBBORN, STUBBORN])
    monkeypatch.setattr(launch, "_GRACE_S", 30.0)
    code = f"import os, time; time.sleep(1); os.kill({os.getpid()}, 2); time.sleep(1); os.kill({os.getpid()}, 2)"
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code]), pytest.raises(Interrupted):
        launch_ranks(Train(optimizer=HpMuon()), tmp_path, num_ranks=2)
    assert time.monotonic() - began < 10
    assert [process.poll() for process in ranks] == [-signal.SIGKILL] * 2


def test_an_ignored_signal_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    started(monkeypatch, [[sys.executable, "-c", "pass"]])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert launch_ranks(Train(optimizer=HpMuon()), tmp_path, num_ranks=1) is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_whose_launcher_is_gone_ends_before_it_imports_anything(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['rank', 'x', 'y']; from hp_muon_plugin.train import rank_main\n"
        "assert not {'omegaconf', 'torch', 'numpy', 'hydra'} & set(sys.modules)\n"
        "rank_main.main()"
    )
    environment = {**os.environ, LAUNCHER: str(os.getpid())}
    asked = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "FileNotFoundError" in asked.stderr or "KeyError: 'RANK'" in asked.stderr  # it went on
    environment[LAUNCHER] = "1"
    orphan = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (orphan.returncode, orphan.stderr) == (1, "")


def test_a_rank_says_who_killed_it_after_it_has_tidied_up(tmp_path: Path) -> None:
    """SIGTERM ended rank 0 at once: the cursor stayed hidden, TensorBoard's last events were lost."""
    code = (
        "import os, signal, hp_muon_plugin.train.worker as worker\n"
        "def run_rank(config, folder):\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    finally:\n        print('tidy', flush=True)\n"
        "worker.load_train = lambda path: None\nworker.run_rank = run_rank\nos.environ['RANK'] = '0'\n"
        "worker.run_process('x', 'y')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "tidy\n", "")
