"""A rank that fails, or a launcher that is killed, ends every rank, and the cause is named."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli.commands import CLI, TINY, assert_gone, has_ended, hp_muon, ranks_of, started, workers_of

from hp_muon_plugin.train.environment import START

# what these start is at the mercy of what else the machine does: once more before it counts
pytestmark = pytest.mark.flaky(reruns=1)
BOTH_WAYS = pytest.mark.parametrize("start", ["auto", "fresh"])


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize(("victim", "start"), [(0, "auto"), (1, "auto"), (1, "fresh")])
def test_a_killed_rank_ends_the_others_with_the_cause(victim: int, start: str, tmp_path: Path) -> None:
    process = started(tmp_path, **{START: start})
    pids = workers_of(process.pid)
    ranks = ranks_of(process.pid)
    assert (sorted(ranks), len(pids)) == ([0, 1], 3 if start == "auto" else 2)
    os.kill(ranks[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"hp-muon: rank {victim} failed: was killed by SIGKILL (often: out of memory)" in stderr
    assert stderr.count("hp-muon:") == 1
    assert_gone(pids)


@pytest.mark.slow  # starts two real ranks and waits for the timeout of 5 s
def test_a_silent_rank_ends_the_run_within_the_timeout(tmp_path: Path) -> None:
    process = started(tmp_path, "topology.timeout_s=5")
    pids = workers_of(process.pid)
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=40)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    told = r"hp-muon: rank 0 failed: RuntimeError: .*(Timed out|timeout)"  # which collective it was is chance
    assert re.search(told, stderr, re.IGNORECASE | re.DOTALL), stderr
    assert_gone(pids)


@pytest.mark.slow  # starts the command
@BOTH_WAYS
def test_ranks_that_still_import_end_with_a_killed_launcher(start: str, tmp_path: Path) -> None:
    """They asked to die with the launcher after their imports, and stayed for ever."""
    process = subprocess.Popen(
        [*CLI, "train", *TINY],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, START: start},
    )
    deadline = time.monotonic() + 30
    pids: list[int] = []
    while time.monotonic() < deadline and not pids:
        pids = workers_of(process.pid)
    process.kill()
    process.wait(timeout=20)
    assert pids
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow  # starts two real ranks
@BOTH_WAYS
def test_ranks_end_with_a_killed_launcher(start: str, tmp_path: Path) -> None:
    process = started(tmp_path, **{START: start})
    pids = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=20)
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow  # starts two real ranks
def test_a_rank_that_raises_is_named_with_its_message(tmp_path: Path) -> None:
    """A learning rate that overflows: 20 skipped steps in a row are an error, on every rank the same."""
    extreme = ["optimizer.lr=1e30", "run.steps=60", "optimizer.clip_grad=0"]
    done = hp_muon("train", *TINY, *extreme, "run.name=bad", folder=tmp_path)
    assert done.returncode == 1  # 2 is for what was written wrongly
    assert re.search(r"hp-muon: rank \d failed: 20 steps in a row had a NaN or infinite loss, gradient", done.stderr)
    assert re.search(r"fix: lower optimizer\.lr.*\n  its output: outputs/bad/rank\d\.log", done.stderr)
    assert done.stderr.count("hp-muon:") == 1


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize("steps", [10, 40])
def test_adamw_that_diverges_is_a_failure_too(steps: int, tmp_path: Path) -> None:
    """Megatron takes steps with NaN gradients: the run said "done" and exit code 0."""
    extreme = ["optimizer=adamw", "optimizer.lr=1e30", f"run.steps={steps}", "optimizer.clip_grad=0"]
    done = hp_muon("train", *TINY, *extreme, "run.name=bad", folder=tmp_path)
    assert done.returncode == 1
    wanted = "the held-out loss after the last step is nan" if steps < 20 else "20 steps in a row had a NaN or infinite"
    assert wanted in done.stderr
    assert "its output: outputs/bad/rank" in done.stderr
    lines = (tmp_path / "outputs" / "bad" / "metrics.jsonl").read_text().splitlines()
    assert None in [json.loads(line, parse_constant=pytest.fail).get("loss/train", 0) for line in lines]


@pytest.mark.slow  # starts two real ranks
def test_a_bad_token_behind_the_checked_ones_is_named_by_its_rank(tmp_path: Path) -> None:
    """Under tensor parallelism it was taken for a token of the other rank, and nobody noticed."""
    import numpy as np

    from hp_muon_plugin.train.index_file import write_dataset

    (tmp_path / "sitecustomize.py").write_text(
        "import hp_muon_plugin.train.token_checks as checks\n"
        "checks.tokens_to_check = lambda num_files: 10\n"  # as if the dataset had more than 4 million tokens
    )
    tokens = np.arange(2000, dtype=np.uint16) % 50
    tokens[50:1000] = 9000
    write_dataset(str(tmp_path / "text"), list(tokens.reshape(50, 40)))
    mine = ["data=megatron", "data.path=text", "data.vocab_size=60", "run.steps=2", 'data.split="50,50,0"']
    done = hp_muon("train", *TINY, *mine, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 2
    assert re.search(
        r"hp-muon: data\.vocab_size=60: text\.bin \(in samples \d+ to \d+\) holds token id 9000", done.stderr
    )


@pytest.mark.slow  # starts two real ranks
@BOTH_WAYS
def test_what_a_rank_started_ends_with_the_run(start: str, tmp_path: Path) -> None:
    """Megatron's writers of checkpoints are processes of their own, and stayed behind."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, subprocess\n"
        "import hp_muon_plugin.train.worker as worker\n"
        "run_rank = worker.run_rank\n"
        "def start_child_too(config, folder):\n"
        "    child = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"    open(f'{tmp_path}/child.' + os.environ['RANK'], 'w').write(str(child.pid))\n"
        "    run_rank(config, folder)\n"
        "worker.run_rank = start_child_too\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = hp_muon("train", *TINY, "run.steps=2", folder=tmp_path, PYTHONPATH=path, **{START: start})
    assert done.returncode == 0, done.stderr
    children = [int((tmp_path / f"child.{rank}").read_text()) for rank in range(2)]
    assert all(has_ended(pid) for pid in children)
