"""Ctrl-C at any moment: one line, and the end of every rank."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.commands import CLI, TINY, assert_gone, pieces, started, wait_for_steps, without_escapes, workers_of

from hp_muon_plugin.train.environment import START

# what these start is at the mercy of what else the machine does: once more before it counts
pytestmark = pytest.mark.flaky(reruns=1)


def interrupted_after(seconds: float, *arguments: str, folder: Path) -> tuple[int, str]:
    process = subprocess.Popen(
        [*CLI, "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    return process.returncode, stderr


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize(
    ("sent", "start"), [(signal.SIGINT, "auto"), (signal.SIGTERM, "auto"), (signal.SIGINT, "fresh")]
)
def test_ctrl_c_ends_every_rank_promptly_with_one_message(sent: signal.Signals, start: str, tmp_path: Path) -> None:
    process = started(tmp_path, **{START: start})
    pids = workers_of(process.pid)
    assert len(pids) == (3 if start == "auto" else 2)
    began = time.monotonic()
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - began < 8
    assert process.returncode == 130
    note = "hp-muon: interrupted; every rank has ended, and metrics up to the last step are in outputs/long\n"
    assert stderr.count(note) == 1
    assert "Traceback" not in stderr
    assert_gone(pids)


@pytest.mark.slow  # starts two real ranks
def test_ctrl_c_on_a_terminal_leaves_a_cursor_and_a_line_for_the_message(tmp_path: Path) -> None:
    """The cursor stayed hidden, and the message stood at the end of the bar."""
    import pty

    master, slave = pty.openpty()
    command = [*CLI, "train", *TINY, "run.steps=100000"]
    process = subprocess.Popen(command, stdout=slave, stderr=slave, cwd=tmp_path)
    os.close(slave)
    shown, is_sent = b"", False
    for piece in pieces(master):
        shown += piece
        if not is_sent and "3/100000" in without_escapes(shown):
            process.send_signal(signal.SIGINT)
            is_sent = True
    assert process.wait(timeout=20) == 130
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # shown again after it was hidden
    assert re.search(rb"(\n|\x1b\[2K)hp-muon: interrupted; every rank has ended, and metrics", shown)


@pytest.mark.slow  # starts the command several times
@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5, 0.8, 1.5])
def test_ctrl_c_at_the_very_start_is_one_line(seconds: float, tmp_path: Path) -> None:
    code, stderr = interrupted_after(seconds, *TINY, "run.steps=100000", folder=tmp_path)
    has_not_begun = ", in main" not in stderr and (code == -signal.SIGINT or "init_import_site" in stderr)
    if has_not_begun:
        pytest.skip("Python had not come to our main() yet")
    assert code == 130, stderr
    lines = [line for line in stderr.splitlines() if not line.startswith("W")]
    assert len(lines) == 1, stderr
    assert re.fullmatch(r"hp-muon: interrupted(; every rank has ended before the first step was done)?", lines[0])


@pytest.mark.parametrize("made_of_it", ["raise ValueError('NoneType')", "return 3"])
def test_ctrl_c_that_a_library_turns_into_an_error_or_drops_is_ctrl_c(made_of_it: str, tmp_path: Path) -> None:
    """Pressed while Hydra composed, it was reported as a mistake in the configuration."""
    script = f"""
import os, signal
from omegaconf import OmegaConf
from hp_muon_plugin.cli.main import main

def steps():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        {made_of_it}

OmegaConf.register_new_resolver("steps", steps)
main(["train", "model.moe.num_experts=2", "run.steps=${{steps:}}"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "hp-muon: interrupted\n"


@pytest.mark.slow  # starts two real ranks
def test_an_impatient_ctrl_c_shows_no_traceback_at_any_moment(tmp_path: Path) -> None:
    process = started(tmp_path)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "hp-muon: interrupted" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow  # starts two real ranks
def test_ctrl_c_in_a_sweep_starts_no_further_job(tmp_path: Path) -> None:
    """Every job but the first was still trained."""
    arguments = ["-m", "optimizer.lr=0.001,0.002,0.003", "run.steps=100000", "hydra.sweep.subdir=${hydra.job.num}"]
    process = subprocess.Popen(
        [*CLI, "train", *TINY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    wait_for_steps(tmp_path / "outputs" / "train" / "0" / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr.count("hp-muon: interrupted") == 1
    assert not (tmp_path / "outputs" / "train" / "1").exists()
    assert (tmp_path / "outputs" / "train" / "multirun.yaml").is_file()
