"""Ranks that are forked from one process are as good as processes of their own, and are ended like them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.commands import has_ended

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.platform.signs import signs_of_accelerator
from hp_muon_plugin.train import forked
from hp_muon_plugin.train.environment import START, python_module
from hp_muon_plugin.train.forked import may_fork
from hp_muon_plugin.train.launch import Interrupted, launch_module
from hp_muon_plugin.train.worker import Failure

BOTH_WAYS = pytest.mark.parametrize("start", ["auto", "fresh"])
TOLD = """
import faulthandler, gc, json, os, random, signal, subprocess, sys, threading, warnings
WRITTEN = print("imported")  # stays in the buffer
def main():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MINE")
    handlers = {s.name: repr(signal.getsignal(s)) for s in signal.Signals}
    report = {
        "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "environment": [os.environ.get(name) for name in names],
        "inherited": subprocess.run(["printenv", "RANK"], capture_output=True, text=True).stdout,
        "own session": (os.getpid(), os.getpid()) == (os.getsid(0), os.getpgid(0)),
        "started by": os.getppid() == int(os.environ["HP_MUON_LAUNCHER_PID"]),
        "handlers": handlers,
        "blocked": [s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "collects": gc.isenabled(),
        "tells of faults": faulthandler.is_enabled(),
        "threads": threading.active_count(),
        "where": os.getcwd(),
    }
    print("rank", os.environ["RANK"], flush=True)
    print("wrong", file=sys.stderr)
    report["random"] = random.random()
    with open(sys.argv[1] + "." + os.environ["RANK"], "w") as file:
        import json
        json.dump(report, file)
"""


class Ranks:
    """Launches ranks of a module that a test wrote."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        others = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{others}" if others else str(folder))  # an empty entry is "here"

    def write(self, source: str) -> None:
        (self.folder / "small_rank.py").write_text(source + "\nif __name__ == '__main__':\n    main()\n")

    def launch(self, start: str = "auto", *, num_ranks: int = 2, folder: Path | None = None) -> Failure | None:
        self._monkeypatch.setenv(START, start)
        return launch_module(
            ["small_rank", str(self.folder / "told")],
            folder or self.folder,
            num_ranks=num_ranks,
            threads=1,
            platform=PlatformName.cpu,
        )


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def children() -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if forked._MODULE in line]


def test_a_forked_rank_finds_what_a_new_process_finds(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    ranks.write(TOLD)
    told, logs = {}, {}
    for start in ("auto", "fresh"):
        assert ranks.launch(start) is None
        told[start] = [json.loads((ranks.folder / f"told.{rank}").read_text()) for rank in range(2)]
        logs[start] = (ranks.folder / "rank1.log").read_text()
    numbers = [report.pop("random") for start in told for report in told[start]]
    assert len(set(numbers)) == 4
    assert told["auto"] == told["fresh"]
    assert told["auto"][1]["environment"] == ["1", "1", "2", "2", "1", "1"]
    assert told["auto"][1]["own session"]
    assert "wrong" in logs["auto"]


def test_what_was_written_is_written_once(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.write(TOLD)
    assert ranks.launch() is None
    assert capfd.readouterr().out == "imported\nrank 0\n"
    assert (ranks.folder / "rank1.log").read_text() == "rank 1\nwrong\n"


@BOTH_WAYS
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(3)", "ended with exit code 3 and no message"),
        ("raise ValueError('x')", "ended with exit code 1 and no message"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (often: out of memory)"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise KeyboardInterrupt", "was killed by SIGINT"),
    ],
)
def test_how_a_rank_ended_is_told(start: str, body: str, message: str, ranks: Ranks) -> None:
    ranks.write(f"import os, sys\ndef main():\n    if os.environ['RANK'] == '1':\n        {body}")
    failure = ranks.launch(start)
    assert failure is not None
    assert (failure.rank, failure.message, failure.exit_code) == (1, message, 1)
    assert failure.log == (None if "exit" in body or "9" in body else ranks.folder / "rank1.log")


@BOTH_WAYS
def test_the_end_of_a_rank_is_that_of_any_process(start: str, ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    """What was registered runs, threads are waited for, and nothing of the process that forked is."""
    ranks.write(
        "import atexit, os, threading, time\n"
        "atexit.register(lambda: print('registered', os.environ.get('RANK'), flush=True))\n"
        "def late():\n    time.sleep(0.3)\n    print('late')\n"
        "def main():\n    threading.Thread(target=late).start()\n"
    )
    assert ranks.launch(start) is None
    assert capfd.readouterr().out == "late\nregistered 0\n"
    assert (ranks.folder / "rank1.log").read_text() == "late\nregistered 1\n"


@pytest.mark.parametrize(
    "broken",
    [
        "import no_such_module",
        "def import_ahead():\n    import no_such_module\nmain = import_ahead",
        "raise SystemExit(1)",
    ],
    ids=["module", "ahead", "exit"],
)
def test_a_failing_import_is_told_as_by_new_processes(broken: str, ranks: Ranks) -> None:
    ranks.write(broken)
    told = [ranks.launch(start) for start in ("auto", "fresh")]
    assert told[0] is not None
    assert told[0] == told[1]
    assert told[0].message == "ended with exit code 1 and no message"


def test_ranks_are_new_processes_where_an_import_starts_a_thread(ranks: Ranks) -> None:
    ranks.write(
        "import threading, time\n"
        "def import_ahead():\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" + TOLD
    )
    assert ranks.launch() is None
    assert [json.loads((ranks.folder / f"told.{rank}").read_text())["threads"] for rank in range(2)] == [1, 1]


@BOTH_WAYS
@pytest.mark.parametrize("seconds", [0.3, 60])
def test_processes_that_an_import_starts_end_with_the_run(start: str, seconds: float, ranks: Ranks) -> None:
    """One that ended was taken for a rank, and the launcher failed with a StopIteration; one that did not was left."""
    pids = ranks.folder / "pids"
    ranks.write(
        "import subprocess, sys, time\n"
        f"started = subprocess.Popen(['sleep', '{seconds}'])\n"
        f"with open({str(pids)!r}, 'a') as file:\n"
        "    file.write(f'{started.pid} ')\n"
        "def main():\n    time.sleep(1)\n"
    )
    assert ranks.launch(start) is None
    assert pids.read_text().split()
    for pid in pids.read_text().split():
        assert has_ended(int(pid))


@pytest.mark.parametrize("program", ["os.execvp('sleep', ['sleep', '40'])", "time.sleep(40)"], ids=["program", "fork"])
def test_what_an_import_leaves_in_a_session_of_its_own_does_not_hold_the_launcher(program: str, ranks: Ranks) -> None:
    """It held the pipe of the process that forks."""
    ranks.write(
        "import os, time\n"
        "def import_ahead():\n"
        "    if os.fork():\n        os.wait()\n        return\n"
        "    os.setsid()\n"
        "    if os.fork():\n        os._exit(0)\n"
        f"    {program}\n    os._exit(0)\n"
        "def main():\n    pass\n"
    )
    began = time.monotonic()
    assert ranks.launch() is None
    assert time.monotonic() - began < 25


@BOTH_WAYS
def test_a_file_of_the_users_is_not_imported_for_pythons_own(
    start: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` looks into the working folder first: with a random.py there no rank started."""
    mine = ranks.folder / "mine"
    mine.mkdir()
    (mine / "random.py").write_text("raise RuntimeError('not the one of Python')")
    monkeypatch.chdir(mine)
    ranks.write("import random\ndef main():\n    random.random()")
    assert "-P" in python_module("x")
    assert ranks.launch(start) is None
    monkeypatch.syspath_prepend(mine)
    assert "-P" not in python_module("x")  # as where the package is found in the working folder alone


@BOTH_WAYS
def test_a_reason_that_the_folder_has_no_room_for_is_told(start: str, ranks: Ranks) -> None:
    """On a full disk an empty file was left there, at which the launcher failed."""
    (ranks.folder / "rank1.error.json").mkdir()
    (ranks.folder / "rank0.error.json").touch()
    ranks.write(
        "import os, sys, pathlib\n"
        "from hp_muon_plugin.train.worker import run_and_report\n"
        "def fail():\n    if os.environ['RANK'] == '1':\n        raise OSError(28, 'No space left on device')\n"
        "def main():\n    run_and_report(fail, pathlib.Path(sys.argv[1]).parent)\n"
    )
    failure = ranks.launch(start)
    assert failure == Failure(1, "OSError: [Errno 28] No space left on device", 1, ranks.folder / "rank1.log")


@BOTH_WAYS
def test_a_rank_that_cannot_be_started_ends_the_others(start: str, ranks: Ranks) -> None:
    ranks.write("import time\ndef main():\n    time.sleep(60)")
    failure = ranks.launch(start, folder=ranks.folder / "nowhere")
    assert failure is not None
    assert failure.rank == 1
    assert failure.message.startswith("could not be started: [Errno 2]")


def _signal_soon(action: str) -> "subprocess.Popen[bytes]":
    """Acts on this process or on the one that forks, half a second after that has begun."""
    code = f"""
import os, signal, subprocess, time
parent, command = {os.getpid()}, ["ps", "-ww", "-o", "pid=,args=", "--ppid", "{os.getpid()}"]
def forking():
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "-m {forked._MODULE}" in line and str(os.getpid()) not in line]
while not forking():
    time.sleep(0.05)
time.sleep(0.5)
{action}
"""
    return subprocess.Popen([sys.executable, "-c", code])


def test_ctrl_c_is_heard_while_the_import_goes_on(ranks: Ranks) -> None:
    ranks.write("import time\ntime.sleep(60)")
    began = time.monotonic()
    with _signal_soon("os.kill(parent, signal.SIGINT)"), pytest.raises(Interrupted):
        ranks.launch()
    assert time.monotonic() - began < 10
    assert not children()


@pytest.mark.parametrize("phase", ["import", "run"])
def test_what_forks_may_be_killed_at_any_time(phase: str, ranks: Ranks) -> None:
    ended = ranks.folder / "pids"
    sleep = f"open({str(ended)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    ranks.write(f"import os, time\n{sleep if phase == 'import' else ''}\ndef main():\n    {sleep}")
    with _signal_soon("os.kill(forking()[0], signal.SIGKILL)"):
        failure = ranks.launch()
    assert failure is not None
    killed = "was killed by SIGKILL (often: out of memory)"
    wanted = f"could not be started: what imports for all ranks {killed}" if phase == "import" else killed
    assert failure.message == wanted
    for pid in ended.read_text().split():
        assert has_ended(int(pid))


def test_a_rank_that_will_not_end_is_killed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.write("import signal, time\ndef main():\n    signal.signal(15, signal.SIG_IGN)\n    time.sleep(60)")
    monkeypatch.setattr("hp_muon_plugin.train.launch._GRACE_S", 0.5)
    began = time.monotonic()
    with _signal_soon("time.sleep(1); os.kill(parent, signal.SIGTERM)"), pytest.raises(Interrupted):
        ranks.launch()
    assert time.monotonic() - began < 20
    assert not children()


@pytest.mark.slow  # imports torch
def test_a_ranks_memory_is_its_own(ranks: Ranks) -> None:
    """Neither what the import took for a while nor what another rank takes."""
    ranks.write(
        "import json, os, sys\n"
        "def import_ahead():\n"
        "    import hp_muon_plugin.platform.base\n"
        "    bytearray(os.urandom(1)) * (400 << 20)\n"
        "def main():\n"
        "    from hp_muon_plugin.platform.base import CpuPlatform\n"
        "    before = CpuPlatform().memory_bytes()\n"
        "    if os.environ['RANK'] == '1':\n        bytearray(os.urandom(1)) * (100 << 20)\n"
        "    json.dump([before, CpuPlatform().memory_bytes()], open(sys.argv[1] + os.environ['RANK'], 'w'))\n"
    )
    assert ranks.launch() is None
    (before, after), (before_1, after_1) = (json.loads((ranks.folder / f"told{rank}").read_text()) for rank in range(2))
    mib = 1 << 20
    assert 50 * mib < before < 400 * mib
    assert after - before < 20 * mib
    assert 95 * mib < after_1 - before_1 < 120 * mib


def test_only_ranks_without_a_device_share_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(START, raising=False)
    monkeypatch.setattr(forked, "signs_of_accelerator", lambda: ())
    assert may_fork(PlatformName.cpu, num_ranks=2, threads=1)
    assert may_fork(PlatformName.auto, num_ranks=2, threads=1)
    assert not may_fork(PlatformName.cuda, num_ranks=2, threads=1)
    assert not may_fork(PlatformName.npu, num_ranks=2, threads=1)
    assert not may_fork(PlatformName.cpu, num_ranks=1, threads=1)
    assert not may_fork(PlatformName.cpu, num_ranks=2, threads=2)
    monkeypatch.setattr(forked, "signs_of_accelerator", lambda: ("/dev/nvidia0",))
    assert not may_fork(PlatformName.cpu, num_ranks=2, threads=1)
    monkeypatch.setattr(forked, "signs_of_accelerator", lambda: ())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not may_fork(PlatformName.cpu, num_ranks=2, threads=1)
    monkeypatch.setenv(START, "fork")
    with pytest.raises(ConfigError, match="HP_MUON_START=fork: is no way to start ranks\n  fix: .* auto, fresh"):
        may_fork(PlatformName.cpu, num_ranks=2, threads=1)


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl", "nvhost-gpu", "nvmap", "dxg", "kfd", "davinci3", "accel"])
def test_device_files_speak_for_an_accelerator(name: str, tmp_path: Path) -> None:
    (tmp_path / "null").touch()
    assert signs_of_accelerator(tmp_path) == ()
    (tmp_path / name).touch()
    assert signs_of_accelerator(tmp_path) == (str(tmp_path / name),)


def test_packages_that_bring_a_device_to_torch_speak_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").touch()
    (tmp_path / "brings-1.dist-info").mkdir()
    (tmp_path / "brings-1.dist-info" / "entry_points.txt").write_text("[torch.backends]\nbrings = brings:load\n")
    (tmp_path / "brings-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert signs_of_accelerator(tmp_path / "dev") == ("torch_npu", "brings:load")
