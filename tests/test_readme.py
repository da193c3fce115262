"""Every command of the README runs as it stands there."""

import os
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from cli.commands import hp_muon

from hp_muon_plugin.train.index_file import write_dataset

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = {
    "hp-muon": [sys.executable, "-m", "hp_muon_plugin.cli.main"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
SHORTER = ["run.steps=1", "run.eval_batches=1", "lr_schedule.warmup_steps=0"]
SMALLER = {
    "newton-schulz": ["--only", "16x64", "--threads", "1", "--seconds", "0.1"],
    "optimizer": ["--only", "4x16x64", "--ranks", "2", "--peers", "none", "--strategies", "auto", "--seconds", "1"],
    "trainer": ["--only", "dense32x1", "--ranks", "2", "--seconds", "0.1"],
    "convert": ["--only", "hp-torch_dist", "--mib", "2", "--seconds", "0.1"],
    "fsdp": ["--only", "16x2", "--ranks", "2", "--tokens", "8", "--seconds", "0.1"],
}
EXAMPLE_DATA = "/prefix/of/bin-and-idx"
CHECKPOINT = Path(__file__).parent / "checkpoint" / "data" / "mcore019_muon_lwl_dense_dp2_dpr.tar.xz"
SHOWN = {
    "convert": "verified",
    "inspect": "format torch_dist, iteration 3, 76 tensors",
    "diff": "equal",
    "verify": "masters round to the stored weights",
}


def commands_of(text: str) -> list[str]:
    """Lines of shell blocks that call one of ours, without their comments."""
    blocks = text.split("```sh\n")[1:]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.partition("```")[0].splitlines()]
    return [line for line in lines if line.partition(" ")[0] in PROGRAMS]


def run_line(program: str, arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; an interpreter of its own for ours would only import the same again."""
    if program == "hp-muon":
        return hp_muon(*arguments, folder=folder, timeout=220)
    command = [*PROGRAMS[program], *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=220, check=False)


@pytest.mark.parametrize("line", [line for line in commands_of(README) if line.startswith("hp-muon ckpt ")])
def test_a_command_for_checkpoints_runs_as_it_stands(line: str, tmp_path: Path) -> None:
    with tarfile.open(CHECKPOINT) as archive:
        archive.extractall(tmp_path, filter="data")
    places = {"SRC": "ckpt", "A": "ckpt", "B": "ckpt", "DST": "out"}
    program, *arguments = [places.get(word, word) for word in shlex.split(line)]
    done = run_line(program, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert SHOWN[arguments[1]] in done.stdout + done.stderr
    assert (tmp_path / "out").is_dir() == (arguments[1] == "convert")


def test_the_commands_are_found() -> None:
    found = commands_of(README)
    assert len(found) >= 8
    assert {line.split()[0] for line in found} == set(PROGRAMS)
    assert sum(line.startswith("hp-muon train") for line in found) >= 6


@pytest.mark.slow  # starts up to four real ranks for each
@pytest.mark.timeout(240)  # the sweep is three runs
@pytest.mark.parametrize("line", [line for line in commands_of(README) if not line.startswith("hp-muon ckpt ")])
def test_a_command_runs_as_it_stands(line: str, tmp_path: Path) -> None:
    """The dry run on 8 ranks was refused, and the torchrun line did nothing with exit code 0."""
    pytest.importorskip("megatron.core")
    generator = np.random.default_rng(0)
    write_dataset(str(tmp_path / "mine"), [generator.integers(0, 32000, 500, dtype=np.uint16) for _ in range(20)])
    program, *arguments = shlex.split(line.replace(EXAMPLE_DATA, str(tmp_path / "mine")))
    is_plan = "--dry-run" in arguments or "plan" in arguments
    trains = "train" in arguments or is_plan
    shorter = SHORTER if trains else SMALLER[arguments[1]] if "bench" in arguments else []
    done = run_line(program, [*arguments, *shorter], tmp_path)
    assert done.returncode == 0, done.stderr
    if "bench" in arguments:
        wanted = {**dict.fromkeys(("fsdp", "trainer", "convert"), ["ratio"]), "optimizer": ["auto (hp)"]}
        wanted = wanted.get(arguments[1], ["standard float32", "gram float32"])
        assert any(text in done.stdout for text in wanted)
        assert list(tmp_path.rglob("*.json"))
    elif not trains:
        assert "no problems found" in done.stdout
    elif is_plan:
        assert "Muon step of " in done.stdout
    else:
        assert "step 1: held-out loss" in done.stdout
    assert bool(list(tmp_path.rglob("metrics.jsonl"))) == (trains and not is_plan)


@pytest.mark.parametrize("command", ["train", "doctor", "bench"])
@pytest.mark.parametrize("repeat", [False, True])
def test_every_command_is_a_module_too(command: str, repeat: bool, tmp_path: Path) -> None:
    """`python -m hp_muon_plugin.cli.train` did nothing, with exit code 0."""
    arguments = [*([command] if repeat else []), "--nonsense"]
    done = subprocess.run(
        [sys.executable, "-m", f"hp_muon_plugin.cli.{command}", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 2
    assert "hp-muon" in done.stderr
    assert "Traceback" not in done.stderr
