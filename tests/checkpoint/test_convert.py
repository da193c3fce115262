"""Conversions that are interrupted, have too little memory or disk, or would overwrite: nothing is harmed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.checkpoint import convert, placing
from hp_muon_plugin.checkpoint.canonical import Key, Momentum, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint, writer
from hp_muon_plugin.cli.ckpt import run
from hp_muon_plugin.errors import CheckpointError, ConfigError
from tests.checkpoint.fixtures import CORRUPT, differences, made_up, names, unpacked

NAME = "mcore019_muon_lwl_dense_dp2_dpr"
BIG_MIB = 192
ROOM_MIB = 112
BUDGET_MIB = 16

LIMITED = """
import resource, sys, threading
import torch, torch.distributed.checkpoint, torch.distributed.checkpoint.filesystem
from hp_muon_plugin.cli.ckpt import run
import hp_muon_plugin.checkpoint.check, hp_muon_plugin.checkpoint.formats.hp, hp_muon_plugin.cli.ckpt_progress
import hp_muon_plugin.checkpoint.formats.torch_dist, hp_muon_plugin.cli.ckpt_text
torch.set_num_threads(1)
torch.ones(10).bfloat16().add(1)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + {room} * 2**20,) * 2)
try:  # the limit is real
    torch.empty(({room} + 16) * 2**20, dtype=torch.uint8)
    sys.exit(99)
except RuntimeError:
    pass
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch_dist checkpoint of 192 MiB in several files."""
    folder = tmp_path_factory.mktemp("big") / "source"
    folder.mkdir()
    source = made_up(BIG_MIB)
    writer("torch_dist").write(source, folder, Target(shard_bytes=50 * 2**20), lambda nbytes: None, 2**27)
    return folder


def forked(*arguments: str | Path, file_bytes: int | None = None) -> int:
    """Run the command in a child, which may write files of at most so many bytes; its process id."""
    child = os.fork()
    if child:
        return child
    code = 98
    try:
        torch.set_num_threads(1)  # the pool of the parent's threads is not there
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        code = run([str(argument) for argument in arguments])
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.slow
def test_memory_stays_within_the_budget(big: Path, tmp_path: Path) -> None:
    """slow: writes and reads 192 MiB in a process that may have 112 MiB beyond its libraries."""
    command = ["convert", str(big), str(tmp_path / "hp"), "--to", "hp", "--budget", f"{BUDGET_MIB}M", "--drop"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(room=ROOM_MIB), *command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    source, ours = open_checkpoint(big), open_checkpoint(tmp_path / "hp")
    largest = max(info.nbytes for info in source.tensors().values())
    total = sum(info.nbytes for info in source.tensors().values())
    assert largest > BUDGET_MIB * 2**20
    assert total > ROOM_MIB * 2**20
    assert ours.tensors() == source.tensors()
    hashes = json.loads((tmp_path / "hp" / "iter_0000007" / convert.REPORT).read_text())["xxh3_128"]
    assert len(hashes) == len(source.tensors())


def killed_while_writing(big: Path, dst: Path, *options: str) -> None:
    child = forked("convert", big, dst, "--to", "hp", "--budget", "16M", "--drop", *options)
    partial = dst / "iter_0000007.hp_muon_partial"
    while not any(path.stat().st_size > 2**22 for path in partial.glob("*.distcp")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert partial.is_dir()


def test_killed_conversion_leaves_no_checkpoint_and_can_be_done_again(big: Path, tmp_path: Path) -> None:
    dst = tmp_path / "hp"
    before = {path.name: path.stat().st_mtime_ns for path in big.iterdir()}
    killed_while_writing(big, dst)
    with pytest.raises(CheckpointError):
        open_checkpoint(dst)
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(dst / "iter_0000007.hp_muon_partial")
    assert {path.name: path.stat().st_mtime_ns for path in big.iterdir()} == before
    small = open_checkpoint(unpacked(NAME, tmp_path) / "ckpt")
    small.state().iteration = 7
    convert.convert(convert.plan(small, "hp", Target()), dst)
    assert names(dst.iterdir()) == ["iter_0000007", "latest_checkpointed_iteration.txt"]
    assert not differences(small, open_checkpoint(dst))


def test_killed_replacement_leaves_the_old_checkpoint(big: Path, tmp_path: Path) -> None:
    small = open_checkpoint(unpacked(NAME, tmp_path) / "ckpt")
    small.state().iteration = 7
    dst = tmp_path / "hp"
    convert.convert(convert.plan(small, "hp", Target()), dst)
    killed_while_writing(big, dst, "--force")
    assert not differences(small, open_checkpoint(dst))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    writer("torch_dist").write(made_up(8), source, Target(), lambda nbytes: None, 2**24)
    child = forked("convert", source, tmp_path / "hp", "--to", "hp", "--drop", file_bytes=2**20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "File too large while writing; what was written is removed" in capfd.readouterr().err
    assert not (tmp_path / "hp").exists()


def test_too_small_a_disk_is_said_before_the_work(tmp_path: Path) -> None:
    place = placing.destination(tmp_path / "dst", 7, is_tracked=True)
    with pytest.raises(CheckpointError, match="the checkpoint needs"):
        placing.check(place, tmp_path / "source", shutil.disk_usage(tmp_path).free, force=False)


def test_nothing_is_overwritten_without_force_and_never_the_source(tmp_path: Path) -> None:
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    assert run(["convert", str(fixture), str(tmp_path / "hp"), "--to", "hp"]) == 0
    assert run(["convert", str(fixture), str(tmp_path / "hp"), "--to", "hp"]) == 2
    assert run(["convert", str(fixture), str(tmp_path / "hp"), "--to", "hp", "--force"]) == 0
    assert names((tmp_path / "hp").iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    source = open_checkpoint(fixture)
    with pytest.raises(ConfigError, match="is the source"):
        convert.convert(convert.plan(source, "torch_dist", Target()), fixture, force=True)


def test_two_conversions_to_one_folder_do_not_meet(tmp_path: Path) -> None:
    place = placing.destination(tmp_path / "dst", 7, is_tracked=True)
    with placing.placed(place) as folder:
        (folder / "mark").touch()
        with pytest.raises(CheckpointError, match="another conversion is writing"), placing.placed(place):
            pass
    assert names((tmp_path / "dst").iterdir()) == ["iter_0000007", "latest_checkpointed_iteration.txt"]


def test_the_reader_of_a_table_may_leave(tmp_path: Path) -> None:
    """As in `hp-muon ckpt inspect SRC | head -1`: it said `Broken pipe`."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    command = [sys.executable, "-m", "hp_muon_plugin.cli.main", "ckpt", "inspect", str(fixture)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141  # as if SIGPIPE had ended it


def test_losses_are_listed_and_need_a_yes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No random state of the second tensor-parallel rank in the source."""
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    command = ["convert", str(fixture), str(tmp_path / "out"), "--to", "torch_dist", "--tp", "2"]
    assert run([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "lost: random state of (pipeline, tensor) ranks (0, 1)" in out
    assert "\n  decoder.layers.mlp.linear_fc1.weight[*] -> decoder.layers.mlp.linear_fc1.weight[*] (2)\n" in out
    assert run([*command, "--dry-run", "--all"]) == 0
    every = capsys.readouterr().out
    assert "\n  decoder.layers.mlp.linear_fc1.weight[1] -> decoder.layers.mlp.linear_fc1.weight[1]\n" in every
    assert len(every.splitlines()) > len(out.splitlines())
    assert run(command) == 2
    assert "random state of (pipeline, tensor) ranks (0, 1)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*command, "--drop"]) == 0


def test_sums_of_momentum_become_the_averages_that_megatron_keeps(tmp_path: Path) -> None:
    source = open_checkpoint(unpacked(NAME, tmp_path) / "ckpt")
    source.state().momentum = Momentum.sum
    report = convert.convert(convert.plan(source, "torch_dist", Target()), tmp_path / "out")
    key = Key("decoder.layers.0.mlp.linear_fc1.weight", "momentum_buffer")
    written = open_checkpoint(tmp_path / "out")
    assert written.state().momentum is Momentum.average
    assert report.changed[str(key)] == "times 0.05"
    assert written.read(key).equal(source.read(key) * (1 - 0.95))


def test_a_corrupt_source_gives_its_weights_and_nothing_else(tmp_path: Path) -> None:
    fixture = unpacked(CORRUPT, tmp_path) / "ckpt"
    assert run(["convert", str(fixture), str(tmp_path / "out"), "--to", "hp"]) == 3
    assert run(["verify", str(fixture)]) == 3
    assert run(["convert", str(fixture), str(tmp_path / "out"), "--to", "hp", "--weights-only"]) == 0
    assert {key.kind for key in open_checkpoint(tmp_path / "out").tensors()} == {"weight"}


def test_diff_names_the_first_element(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_checkpoint(unpacked(NAME, tmp_path) / "ckpt")
    convert.convert(convert.plan(source, "hp", Target()), tmp_path / "a")
    assert run(["diff", str(tmp_path / "a"), str(source.path)]) == 0
    key = Key("output_layer.weight", "exp_avg")
    read = source.read

    def changed(asked: Key, start: int = 0, stop: int | None = None):  # type: ignore[no-untyped-def]
        rows = read(asked, start, stop)
        if asked == key:
            rows[5, 7] += 1e-3
        return rows

    source.read = changed  # type: ignore[method-assign]
    convert.convert(convert.plan(source, "hp", Target()), tmp_path / "b")
    capsys.readouterr()
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "exp_avg/output_layer.weight: first at [5, 7]: " in capsys.readouterr().out
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--atol", "1e-2"]) == 0


def test_inspect_tells_layout_and_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixture = unpacked("mcore016_moe_ep2_dp2_dpr", tmp_path) / "ckpt"
    assert run(["inspect", str(fixture)]) == 0
    out = capsys.readouterr().out
    assert "format torch_dist, iteration 3, 158 tensors" in out
    assert "sharding dp_reshardable" in out
    assert "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight (8)" in out
    assert run(["inspect", str(fixture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["output_layer.weight"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf"], "no such format to write"),
        (["--to", "hp", "--budget", "7"], "is no number of bytes"),
        (["--to", "torch_dist", "--sharding", "dp"], "not written for this optimizer"),
        (["--to", "torch_dist", "--megatron", "x"], "is no version of megatron-core"),
        (["--to", "torch_dist", "--option", "spec"], "is not KEY=VALUE"),
        (["--to", "torch_dist", "--option", "spec=x"], "no such choice"),
        (["--to", "torch_dist", "--option", "lyers=stacked"], "--option lyers=stacked: is no option of the format"),
        (["--to", "torch", "--option", "make_vocab_size_divisible_by=x"], "is no number above 0"),
        (["--to", "torch", "--option", "experts=grupped"], "one of separate, grouped"),
        (["--to", "torch", "--option", "step=here"], "one of parameter, group, group_tensor"),
        (["--to", "hyper_parallel", "--option", "step=group"], "--option step=group: is no option of the format"),
        (["--to", "hp", "--sharding", "foo"], "--sharding=...: means nothing in the format hp"),
        (["--to", "hp", "--dtype", "bfloat16"], "it is for hf"),
        (["--to", "fsdp2", "--tp", "2"], "--tp=...: means nothing in the format fsdp2"),
        (["--to", "hp", "--vocab-size", "-3"], "--vocab-size=-3: the source has 128 rows"),
        (["--to", "hp", "--vocab-size", "9999"], "--vocab-size=9999: the source has 128 rows"),
    ],
)
def test_wrong_options_are_refused_with_a_fix(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixture = unpacked(NAME, tmp_path) / "ckpt"
    assert run(["convert", str(fixture), str(tmp_path / "out"), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "fix: " in err
