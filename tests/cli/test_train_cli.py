"""``hp-muon train`` as users run it: messages, exit codes, and the end of every rank."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
        (["model=tiny_dense", "model.moe.num_experts=4"], "the chosen model has no model.moe, so nothing in it can be"),
        (["model=tiny_dense", "+model.mla.q_lora_rank=4"], "fix: start from a model that has it, model=tiny_mla"),
        (["model.mla={q_lora_rank:16}"], "model.mla={q_lora_rank:16}: the chosen model has no model.mla"),
        (["steps"], "hp-muon: steps: is no option with a value\n  fix: write option=value, e.g. run.steps=100"),
        (["data.split=80,20,0"], """data.split=80,20,0: has commas, which make a list, a text or several runs
  fix: write 'data.split="80,20,0"' for a text"""),
        (['data.split="1,0,0"'], """fix: e.g. 'data.split="90,10,0"'"""),
        (["run.dir=/proc/nope"], "hp-muon: run.dir=/proc/nope: cannot be written to (/proc/nope: No such file"),
        (["run.dir=/etc/passwd"], "hp-muon: run.dir=/etc/passwd: cannot be written to (/etc/passwd: File exists)"),
        (["data.path=/mine", "data.vocab_size=5"], "data.path=/mine: data=pydoc trains on the text that CPython ships"),
        (["data.cache_dir=/proc/x"], "hp-muon: data.cache_dir=/proc/x: cannot be written to"),
        (["dp.name=foo"], "expected one of [megatron_ddp]"),
        (["optimizer.lr=inf"], "optimizer.lr=inf: must be finite and greater than 0\n  fix: e.g. optimizer.lr=0.005"),
        (["run.eval_batches=0"], "run.eval_batches=0: must be at least 1\n  fix: e.g. run.eval_batches=4"),
        (["optimizer.muon_params=[decoder.x]"], "optimizer.muon_params=decoder.x: fits no parameter"),
        (["model=tiny_dense", "-m", "run.seed=-1"], "run.seed=-1: must be at least 0"),
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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "hp-muon: WORLD_SIZE=: is not set, and RANK says that this process is a rank"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be a number that is not negative"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR=: is not set"),
        ({"HP_MUON_HOOKS": "nonsense"}, "hp-muon: HP_MUON_HOOKS=nonsense: there is no hook 'nonsense'"),
        ({"HP_MUON_HOOKS": "guard"}, "HP_MUON_HOOKS=guard: without the hook optimizer Megatron does not know"),
    ],
)
def test_a_mistake_in_the_environment_is_one_message(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    done = hp_muon("train", folder=tmp_path, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("hp-muon:") == 1
    assert "Traceback" not in done.stderr


def test_a_dry_run_says_the_true_vocabulary(tmp_path: Path) -> None:
    done = hp_muon("train", "--dry-run", "model=tiny_dense", "model.vocab_multiple=1", folder=tmp_path)
    assert "vocabulary 257 padded to 257" in done.stdout


def test_every_model_has_a_plan(tmp_path: Path) -> None:
    """No model with multi-latent attention could be chosen at all."""
    done = hp_muon("train", "--dry-run", "-m", "model=tiny_dense,tiny_moe,tiny_mla", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Muon step of a rank") == 3
    assert "linear_kv_down_proj" in done.stdout
    dense = hp_muon("train", "--dry-run", "model=tiny_mla", "model.moe=null", folder=tmp_path)
    assert dense.returncode == 0, dense.stderr
    assert "experts" not in dense.stdout.partition("parameter ")[2]


def test_hydras_flags_stand_anywhere(tmp_path: Path) -> None:
    """`-m` behind an override was "unrecognized arguments"."""
    done = hp_muon("train", "run.steps=50", "-m", "optimizer.lr=0.1,0.2", "run.dry=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps      50") == 2
    shown = hp_muon("train", "run.steps=50", "--cfg", "job", "run.seed=7", folder=tmp_path)
    assert "seed: 7" in shown.stdout


def test_a_run_leaves_no_files_of_hydras_own(tmp_path: Path) -> None:
    """An empty hydra_app.log, and .hydra of a run that was refused because another one held the folder."""
    assert hp_muon("train", "--dry-run", folder=tmp_path).returncode == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["outputs", "train"]


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
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )  # ps ends with 1 where there is none
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "hp_muon_plugin.train.rank_main" in line]


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
    note = "hp-muon: interrupted; every rank has ended, and metrics up to the last step are in outputs/long\n"
    assert stderr.count(note) == 1
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
    shown = b"".join(pieces(master))
    assert process.wait(timeout=30) == 0
    text = without_escapes(shown)
    assert "3/3" in text
    assert "tokens/s" in text
    assert "step 3: held-out loss" in text
    assert "step 1/3" not in text


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


def interrupted_after(seconds: float, *arguments: str, folder: Path) -> tuple[int, str]:
    process = subprocess.Popen(
        [*CLI, "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    return process.returncode, stderr


@pytest.mark.slow  # starts the command several times
@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5, 0.8, 1.5])
def test_ctrl_c_at_the_very_start_is_one_line(seconds: float, tmp_path: Path) -> None:
    code, stderr = interrupted_after(seconds, *TINY, "run.steps=100000", folder=tmp_path)
    if "hp_muon_plugin" not in stderr and code == -signal.SIGINT:
        pytest.skip("Python itself had not started yet")
    assert code == 130, stderr
    lines = [line for line in stderr.splitlines() if not line.startswith("W")]
    assert len(lines) == 1, stderr
    assert re.fullmatch(r"hp-muon: interrupted(; every rank has ended before the first step was done)?", lines[0])


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
        "checks.check_vocabulary.__kwdefaults__['first'] = 10\n"  # as if the dataset had more than 4 million tokens
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


@pytest.mark.slow  # starts the command
def test_ranks_that_still_import_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """They asked to die with the launcher after their imports, and stayed for ever."""
    process = subprocess.Popen(
        [*CLI, "train", *TINY], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    deadline = time.monotonic() + 30
    pids: list[int] = []
    while time.monotonic() < deadline and not pids:
        pids = workers_of(process.pid)
    process.kill()
    process.wait(timeout=20)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_is_running(pid) for pid in pids):
        time.sleep(0.05)
    assert pids
    assert not [pid for pid in pids if _is_running(pid)]


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
    assert done.returncode == 1  # 2 is for what was written wrongly
    assert re.search(r"hp-muon: rank \d failed: 20 steps in a row had a NaN or infinite loss or gradient", done.stderr)
    assert re.search(r"fix: lower optimizer\.lr.*\n  its output: outputs/bad/rank\d\.log", done.stderr)
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
