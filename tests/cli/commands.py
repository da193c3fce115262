"""The command as users run it, and what has become of its processes."""

import atexit
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.zygote import READ_BY_US, Zygote

CLI = [sys.executable, "-m", "hp_muon_plugin.cli.main"]
TINY = [
    "model=tiny_moe",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "model.seq_length=32",
    "model.moe.num_experts=2",
    "model.moe.ffn_hidden_size=16",
    "run.micro_batch_size=2",
    "run.global_batch_size=4",
    "run.log_interval=1",
    "lr_schedule.warmup_steps=1",
    "topology.ranks=2",
]


def hp_muon(*arguments: str, folder: Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, forked if nothing of its environment matters to what is loaded before it begins."""
    if sys.platform == "linux" and all(name.startswith(READ_BY_US) for name in environment):
        return _zygote().run(list(arguments), folder=folder, timeout=timeout, environment=environment)
    return hp_muon_alone(*arguments, folder=folder, timeout=timeout, **environment)


def hp_muon_alone(
    *arguments: str, folder: Path, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an interpreter of its own, as users do."""
    return subprocess.run(
        [*CLI, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


@functools.cache
def _zygote() -> Zygote:
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def started(tmp_path: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """A long run, once both ranks are training."""
    process = subprocess.Popen(
        [*CLI, "train", *TINY, "run.steps=100000", "run.name=long", "topology.timeout_s=60", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    wait_for_steps(tmp_path / "outputs" / "long" / "metrics.jsonl", process)
    return process


def wait_for_steps(log: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.is_file() and len(log.read_text().splitlines()) > 2:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    raise AssertionError("training did not begin")


def workers_of(parent: int) -> list[int]:
    """Ranks of a launcher, and the process that has forked them, if one has."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    processes = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    ranks = [(int(pid), int(ppid)) for pid, ppid, args in processes if "hp_muon_plugin.train." in args]
    ours = {parent}
    for _ in range(2):
        ours |= {pid for pid, ppid in ranks if ppid in ours}
    return sorted(ours - {parent})


def ranks_of(parent: int) -> dict[int, int]:
    """Process of each rank of a launcher: a forked one is called so, another has it in its environment."""
    found = {}
    for pid in workers_of(parent):
        name = Path(f"/proc/{pid}/comm").read_text()
        environ = Path(f"/proc/{pid}/environ").read_text()
        told = re.match(r"hp-muon rank (\d+)$", name) or re.search(r"\0RANK=(\d+)", environ)
        if told:
            found[int(told[1])] = pid
    return found


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def has_ended(pid: int, *, within_s: float = 5.0) -> bool:
    """Whether a process that was killed is gone: the system ends it when it next gets a core."""
    deadline = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def pieces(terminal: int) -> Iterator[bytes]:
    """What a process writes to its terminal, until it closes it."""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            return
        if not piece:
            return
        yield piece


def without_escapes(shown: bytes) -> str:
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
