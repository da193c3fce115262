"""``hp-muon train`` as users run it: messages, exit codes, and the end of every rank."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    return subprocess.run(
        [*CLI, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.momentm=0.3"], "momentm=0.3: there is no such option\n  fix: did you mean optimizer.momentum?"),
        (["run.stepz=3"], "run.stepz=3: there is no such option\n  fix: did you mean run.steps?"),
        (["modle=tiny_dense"], "modle=tiny_dense: there is no such option\n  fix: did you mean model?"),
        (["optimizer=hp_moun"], "fix: did you mean optimizer=hp_muon?"),
        (["optimizer.scale=big"], "expected one of [match_rms_adamw, spectral"),
        (["optimizer.steps=five"], "optimizer.steps=five"),
        (["topology.tp=3", "topology.ranks=4"], "topology.tp=3: 4 ranks cannot be split into groups of tp*pp = 3*1"),
        (["topology.ranks=0"], "topology.ranks=0: must be at least 1"),
        (["data=megatron"], "data.path=None: data=megatron needs your dataset"),
        (["data=megatron", "data.path=gone", "data.vocab_size=9"], "there is no file gone.bin and no file gone.idx"),
        (["optimizer.schedule=you", "optimizer.steps=3"], "schedule you has 5 different steps"),
        (["platform.precision=fp16"], "platform.precision=fp16: needs dynamic loss scaling"),
        (["model.moe.top_k=99"], "model.moe.top_k=99: a token cannot visit 99 of 8 experts"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = hp_muon("train", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("hp-muon:") == 1
    assert "Traceback" not in done.stderr


def test_a_corrupt_index_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(b"12345678")
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\0\0 and then nothing that makes sense, but long enough")
    done = hp_muon("train", "data=megatron", "data.path=text", "data.vocab_size=300", *TINY, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(r"hp-muon: text\.idx is damaged: .*\n  fix: write the dataset again", done.stderr)


def test_dry_run_prints_the_plan_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from hp_muon_plugin.cli.train import run; "
        "assert run(['--dry-run', 'topology.ranks=4', 'topology.ep=2']) == 0; "
        "assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks      4 = tp 1 x pp 1 x dp 4; experts: etp 1 x ep 2 x pp 1 x expert-dp 2" in done.stdout
    assert "muon=72 parameters" in done.stdout
    assert "q [128,128] k [64,128] v [64,128]" in done.stdout
    assert "GFLOP of Newton-Schulz (5 steps)" in done.stdout
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_unknown_commands_and_help() -> None:
    done = subprocess.run([*CLI, "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no command 'trian'" in done.stderr
    helped = subprocess.run([*CLI, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0
    assert "hp-muon COMMAND" in helped.stdout


@pytest.mark.slow  # starts two real ranks
def test_two_ranks_train_and_write_metrics(tmp_path: Path) -> None:
    done = hp_muon("train", *TINY, "topology.ep=2", "run.steps=3", "run.name=small", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 1/3  loss \d\.\d+  [\d,]+ tokens/s  optimizer [\d.]+ ms  [\d,]+ MiB", done.stdout)
    assert re.search(r"step 3: held-out loss [\d.]+ nats/token \(unigram entropy of the text: [\d.]+\)", done.stdout)
    assert "muon=4 parameters" in done.stderr
    lines = (tmp_path / "outputs" / "small" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]
    assert list((tmp_path / "outputs" / "small" / "tensorboard").glob("events.*"))


@pytest.mark.slow  # starts two real ranks under torchrun
def test_torchrun_works_and_one_rank_reports_a_mistake(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "hp_muon_plugin.cli.main", "train", *TINY[:-1], "run.steps=2", "run.name=small"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    wrong = subprocess.run([*command, "topology.tp=3"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert wrong.returncode != 0
    assert wrong.stderr.count("hp-muon: topology.tp=3") == 1
    assert "exitcode: 2" in wrong.stderr.replace("exitcode  : 2", "exitcode: 2")


def started(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """A long run, once both ranks are training."""
    process = subprocess.Popen(
        [*CLI, "train", *TINY, "run.steps=100000", "run.name=long", "topology.timeout_s=60", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    log = tmp_path / "outputs" / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.is_file() and len(log.read_text().splitlines()) > 2:
            return process
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    raise AssertionError("training did not begin")


def workers_of(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "hp_muon_plugin.train.worker" in line]


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_ctrl_c_ends_every_rank_promptly_with_one_message(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    process = started(tmp_path)
    pids = workers_of(process.pid)
    assert len(pids) == 2
    began = time.monotonic()
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - began < 8
    assert process.returncode == code
    assert stderr.count("hp-muon: interrupted; every rank has ended") == 1
    assert "Traceback" not in stderr
    assert_gone(pids)


@pytest.mark.slow  # starts two real ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_with_the_cause(victim: int, tmp_path: Path) -> None:
    process = started(tmp_path)
    pids = workers_of(process.pid)
    environ = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
    pid = next(pid for pid in pids if f"RANK={victim}".encode() in environ[pid])
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert f"hp-muon: rank {victim} failed: was killed by SIGKILL (often: out of memory)" in stderr
    assert stderr.count("hp-muon:") == 1
    assert_gone(pids)


@pytest.mark.slow  # starts two real ranks and waits for the timeout of 5 s
def test_a_silent_rank_ends_the_run_within_the_timeout(tmp_path: Path) -> None:
    process = started(tmp_path, "topology.timeout_s=5")
    pids = workers_of(process.pid)
    environ = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
    os.kill(next(pid for pid in pids if b"RANK=1" in environ[pid]), signal.SIGSTOP)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=40)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    assert re.search(r"hp-muon: rank 0 failed: RuntimeError: .*(Timed out|timeout)", stderr, re.IGNORECASE), stderr
    assert_gone(pids)


@pytest.mark.slow  # starts two real ranks
def test_a_bar_is_shown_on_a_terminal(tmp_path: Path) -> None:
    import pty

    master, slave = pty.openpty()
    command = [*CLI, "train", *TINY, "run.steps=3", "run.name=bar"]
    process = subprocess.Popen(command, stdout=slave, stderr=subprocess.DEVNULL, cwd=tmp_path)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    assert process.wait(timeout=30) == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert "3/3" in text
    assert "tokens/s" in text
    assert "step 3: held-out loss" in text
    assert "step 1/3" not in text


@pytest.mark.slow  # starts two real ranks
def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    process = started(tmp_path)
    pids = workers_of(process.pid)
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.slow  # starts two real ranks
def test_a_rank_that_raises_is_named_with_its_message(tmp_path: Path) -> None:
    """A learning rate that overflows: 20 skipped steps in a row are an error, on every rank the same."""
    extreme = ["optimizer.lr=1e30", "run.steps=60", "optimizer.clip_grad=0"]
    done = hp_muon("train", *TINY, *extreme, "run.name=bad", folder=tmp_path)
    assert done.returncode == 2
    assert "20 steps in a row had a NaN or infinite gradient" in done.stderr
    assert done.stderr.count("hp-muon:") == 1


@pytest.mark.slow  # starts two real ranks
def test_what_a_rank_started_ends_with_the_run(tmp_path: Path) -> None:
    """Megatron's writers of checkpoints are processes of their own, and stayed behind."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, subprocess\n"
        "if 'LOCAL_RANK' in os.environ:\n"
        "    child = subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"    open(f'{tmp_path}/child.' + os.environ['RANK'], 'w').write(str(child.pid))\n"
    )
    done = hp_muon("train", *TINY, "run.steps=2", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    children = [int((tmp_path / f"child.{rank}").read_text()) for rank in range(2)]
    assert not [pid for pid in children if _is_running(pid)]
