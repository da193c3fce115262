"""``hp-muon train`` with real ranks, from its first step to its last."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.commands import CLI, TINY, hp_muon, hp_muon_alone, pieces, started, without_escapes

# what these start is at the mercy of what else the machine does: once more before it counts
pytestmark = pytest.mark.flaky(reruns=1)


@pytest.mark.slow  # starts two real ranks
def test_two_ranks_train_and_write_metrics(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "import hp_muon_plugin.train.worker as worker\n"
        "run_rank = worker.run_rank\n"
        "def noted(config, folder):\n"
        "    before = set(sys.modules)\n"
        "    run_rank(config, folder)\n"
        "    (folder / ('imported.' + os.environ['RANK'])).write_text(' '.join(set(sys.modules) - before))\n"
        "worker.run_rank = noted\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    options = ["topology.ep=2", "run.steps=3", "run.name=small"]
    done = hp_muon_alone("train", *TINY, *options, folder=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 1/3  loss \d\.\d+  [\d,]+ tokens/s  optimizer [\d.]+ ms  [\d,]+ MiB", done.stdout)
    assert re.search(r"step 3: held-out loss [\d.]+ nats/token \(unigram entropy of the text: [\d.]+\)", done.stdout)
    assert "muon=4 parameters" in done.stderr
    folder = tmp_path / "outputs" / "small"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]
    assert list((folder / "tensorboard").glob("events.*"))
    for rank in range(2):  # one process has imported for both: torch's compiler was imported by each one's optimizer
        imported = (folder / f"imported.{rank}").read_text().split()
        assert len(imported) < 50, imported


def _torchrun(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "hp_muon_plugin.cli.main", "train", *TINY[:-1], *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=90, check=False)


@pytest.mark.slow  # starts two real ranks under torchrun
def test_torchrun_works(tmp_path: Path) -> None:
    done = _torchrun(tmp_path, "run.steps=2", "run.name=small")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


_OWN = ["data=megatron", "data.vocab_size=300"]


@pytest.mark.slow  # starts torchrun
@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        (["optimizer.momentm=0.3"], "momentm", "did you mean"),
        ([*_OWN, "data.path=gone"], "there is no file gone.bin", "fix:"),
        ([*_OWN, "data.path=text"], "text.idx is damaged", "fix: write the dataset again"),
        (["topology.tp=3"], "topology.tp=3", "fix:"),
    ],
    ids=["typo", "missing", "corrupt", "layout"],
)
def test_under_torchrun_a_mistake_is_one_message_and_code_2(
    arguments: list[str], message: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "text.bin").write_bytes(b"12345678")
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\0\0 and then nothing that makes sense, but long enough")
    wrong = _torchrun(tmp_path, *arguments)
    assert wrong.returncode != 0
    assert wrong.stderr.count("hp-muon: ") == 1, wrong.stderr
    told = wrong.stderr.partition("hp-muon: ")[2]
    assert message in told
    assert fix in told
    codes = re.findall(r"exitcode *: (-?\d+)", wrong.stderr)
    assert "2" in codes
    assert set(codes) <= {"2", "-15"}, wrong.stderr  # -15: ended while it still imported, before it had looked


def _hears_sigterm(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow  # waits for some seconds
def test_a_silent_rank_waits_for_the_one_that_reports(tmp_path: Path) -> None:
    """A launcher ends all ranks when the first one fails; that was one that says nothing."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    command = [*CLI, "train", *TINY[:-1], "topology.tp=3"]
    silent = subprocess.Popen(command, env={**os.environ, **variables}, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    speaking = subprocess.run(
        command, env={**os.environ, **variables, "RANK": "0"}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert speaking.returncode == 2
    assert "hp-muon: topology.tp=3" in speaking.stderr
    assert silent.poll() is None
    while not _hears_sigterm(silent.pid):  # it may still import
        assert silent.poll() is None
        time.sleep(0.05)
    silent.terminate()
    assert silent.communicate(timeout=20)[1] == ""
    assert silent.returncode == 2  # as the one that has spoken, though it was the launcher that ended it


@pytest.mark.slow  # starts two real ranks
def test_a_bar_is_shown_on_a_terminal(tmp_path: Path) -> None:
    import pty

    master, slave = pty.openpty()
    command = [*CLI, "train", *TINY, "run.steps=3", "run.name=bar"]
    process = subprocess.Popen(command, stdout=slave, stderr=subprocess.DEVNULL, cwd=tmp_path)
    os.close(slave)
    shown = b"".join(pieces(master))
    assert process.wait(timeout=30) == 0
    text = without_escapes(shown)
    assert "3/3" in text
    assert "tokens/s" in text
    assert "step 3: held-out loss" in text
    assert "step 1/3" not in text


@pytest.mark.slow  # starts two real ranks
def test_a_folder_is_one_runs_at_a_time_and_keeps_what_was_there(tmp_path: Path) -> None:
    process = started(tmp_path)
    second = hp_muon("train", *TINY, "run.steps=2", "run.name=long", folder=tmp_path)
    assert second.returncode == 2
    message = rf"hp-muon: run\.dir=\S+long: another run is writing there \(process {process.pid}\)\n  fix: give"
    assert re.search(message, second.stderr), second.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    log = tmp_path / "outputs" / "long" / "metrics.jsonl"
    before = log.read_text()
    steps = [json.loads(line)["step"] for line in before.splitlines() if "loss/train" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert hp_muon("train", *TINY, "run.steps=2", "run.name=long", folder=tmp_path).returncode == 0
    assert (tmp_path / "outputs" / "long" / "earlier" / "001" / "metrics.jsonl").read_text() == before
    assert len(log.read_text().splitlines()) == 3
    assert len(list((tmp_path / "outputs" / "long" / "tensorboard").iterdir())) == 1


@pytest.mark.slow  # starts two real ranks
def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """The ranks met at a file:// URL, where a question mark ends the path."""
    done = hp_muon("train", *TINY, "run.steps=2", "run.dir='outputs/a?b #c%20'", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "a?b #c%20" / "metrics.jsonl").is_file()
