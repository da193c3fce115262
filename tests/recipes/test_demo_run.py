"""Scripts of recipes: what Ctrl-C does to the run that they have started, and to those still to come."""

import json
import os
import re
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


@pytest.mark.slow  # starts two real ranks, twice
def test_the_demo_ends_with_a_sentence_and_a_plot(tmp_path: Path) -> None:
    tiny = [*TINY[:-2], "run.steps=2", "run.eval_interval=1", "run.eval_batches=1", "lr_schedule.warmup_steps=1"]
    command = [sys.executable, str(RECIPES / "demo" / "run.py"), *tiny, "model.moe.num_experts=2", "model.moe.top_k=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^hp_muon .*adamw's final held-out loss", done.stdout, re.MULTILINE)
    logs = [tmp_path / "outputs" / f"demo_{name}" / "metrics.jsonl" for name in ("hp_muon", "adamw")]
    for log in logs:
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert [entry["step"] for entry in entries if "loss/train" in entry] == [1, 2]
    unigram = next(entry["loss/unigram_entropy"] for entry in entries if "loss/held_out" in entry)
    assert f"unigram entropy of the text: {unigram:.3f} nats per byte" in done.stdout
    assert (tmp_path / "outputs" / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
