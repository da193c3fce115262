"""Scripts of recipes: what Ctrl-C does to the run that they have started, and to those still to come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = ["model.num_layers=1", "model.hidden_size=32", "model.seq_length=32", "run.steps=100000", "run.log_interval=1"]


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize(
    ("mode", "to_all"),
    [("demo --sweep", True), ("demo --sweep", False), ("demo", False), ("weight_decay", True), ("parity", False)],
    ids=["sweep-terminal", "sweep-kill", "demo-kill", "weight_decay-terminal", "parity-kill"],
)
def test_ctrl_c_ends_the_whole_recipe(mode: str, to_all: bool, tmp_path: Path) -> None:
    """A sweep went on with the next learning rate, and the end was a traceback."""
    recipe, *flags = mode.split()
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / recipe / "run.py"), *flags, *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not any(log.stat().st_size for log in tmp_path.glob("outputs/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert stdout.count("$ hp-muon") == 1
    assert stderr.count("hp-muon: interrupted; every rank has ended") == 1
    assert "Traceback" not in stderr
    with pytest.raises(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, 0)
