"""``hp-muon train`` before any rank starts: messages, exit codes, plans."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cli.commands import CLI, TINY, hp_muon, hp_muon_alone


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
        (["steps"], "hp-muon: steps: is no option with a value\n  fix: write option=value, e.g. run.steps=100"),
        (["data.split=80,20,0"], """data.split=80,20,0: has commas, which make a list, a text or several runs
  fix: write 'data.split="80,20,0"' for a text"""),
        (["run.dir=/tmp/l\u00e4uf"], """need quotes of their own\n  fix: write 'run.dir="/tmp/l\u00e4uf"'"""),
        (["optimizer.muon_params=a.b"], "muon_params=a.b: needs a list\n  fix: write 'optimizer.muon_params=[a.b]'"),
        (["optimizer.coefficients=[[1,2,3]]"], "has whole numbers among numbers with a point\n  fix: write 2.0 for 2"),
        (['data.split="1,0,0"'], """fix: e.g. 'data.split="90,10,0"'"""),
        (["run.dir=/proc/nope"], "hp-muon: run.dir=/proc/nope: cannot be written to (/proc/nope: No such file"),
        (["run.dir=/etc/passwd"], "hp-muon: run.dir=/etc/passwd: cannot be written to (/etc/passwd: File exists)"),
        (["data.path=/mine", "data.vocab_size=5"], "data.path=/mine: data=pydoc trains on the text that CPython ships"),
        (["data.cache_dir=/proc/x"], "hp-muon: data.cache_dir=/proc/x: cannot be written to"),
        (["dp.name=foo"], "expected one of [megatron_ddp, hp_fsdp, torch_fsdp2, megatron_fsdp]"),
        (["dp.name=hp_fsdp"], "beside the options of another wrapper\n  fix: write dp=hp_fsdp instead"),
        (["dp=hp_fsdp", "dp.prefetc=2"], "fix: did you mean dp.prefetch?"),
        (["dp=hp_hsdp", "topology.ranks=3"], "dp.replicas=2: the 3 data-parallel ranks cannot be divided"),
        (["optimizer.lr=inf"], "optimizer.lr=inf: must be finite and greater than 0\n  fix: e.g. optimizer.lr=0.005"),
        (["optimizer.lr=1e300"], "optimizer.lr=1e+300: must be between -1e+30 and 1e+30 and greater than 0"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["topology.ranks=0"],
        ["--dry-run"],
        ["data=megatron", "data.path=gone", "data.vocab_size=9"],
        ["checkpoint.resume=nowhere", "checkpoint.save=saved"],
        ["checkpoint.every=2", "run.dir=/proc/nope"],
        ["checkpoint.save=/proc/nope", "model.num_layers=1"],
        ["optimizer.muon_params=[decoder.x]", "run.name=a/b"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("is_there", [False, True])
def test_what_starts_no_run_leaves_nothing(arguments: list[str], is_there: bool, tmp_path: Path) -> None:
    """Hydra made the run's folder before anything was checked."""
    kept = ["outputs", "outputs/train"] if is_there else []
    for name in kept:
        (tmp_path / name).mkdir()
    done = hp_muon("train", "model=tiny_dense", *arguments, folder=tmp_path)
    assert done.returncode == (0 if "--dry-run" in arguments else 2), done.stderr
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == kept


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run.name=a,b", "topology.ranks=0"], 2, "topology.ranks=0"),
        (["run.seed=1,2", "no.such=3"], 2, "no: there is no such option"),
        (["run.seed=1,2", "model=tiny_dense,nothing"], 2, "model=nothing"),
        (["run.seed=1,2", "run.dry=true", "model=tiny_dense"], 0, ""),
        (["hydra.sweep.subdir=${hydra.job.num}", "run.seed=-1,-2", "run.dir=a b"], 2, "run.seed=-2"),
    ],
    ids=["refused", "option", "choice", "plan", "subfolders"],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_sweep_that_starts_no_run_leaves_nothing(
    arguments: list[str], code: int, told: str, is_there: bool, tmp_path: Path
) -> None:
    """Hydra's multirun.yaml was left, in the place of that of an earlier sweep."""
    folder = tmp_path / ("a b" if "run.dir=a b" in arguments else "outputs/train")
    kept = folder / "multirun.yaml"
    if is_there:
        folder.mkdir(parents=True)
        kept.write_text("of an earlier sweep")
    before = sorted(tmp_path.rglob("*"))
    done = hp_muon("train", "-m", *arguments, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file() or path in before] == before
    assert "subdir" in arguments[0] or sorted(tmp_path.rglob("*")) == before
    assert not is_there or kept.read_text() == "of an earlier sweep"


def test_a_plan_needs_no_data(tmp_path: Path) -> None:
    """It was refused without the files of the dataset, and the recipe's plan had to be asked for with other data."""
    wanted = ["model=tiny_dense", "data=megatron"]
    nothing = hp_muon("plan", *wanted, "data.vocab_size=300", folder=tmp_path)
    assert (nothing.returncode, nothing.stderr) == (0, "")
    assert "\ndata       megatron, megatron_ddp; a run needs data.path\n" in nothing.stdout
    assert "vocabulary 300 padded to 320" in nothing.stdout
    gone = hp_muon("plan", *wanted, "data.vocab_size=300", "data.path=0.3 x 0.7 y", folder=tmp_path)
    assert (gone.returncode, gone.stderr) == (0, "")
    assert "; NOT THERE, and a run needs it: x.bin, x.idx, y.bin, y.idx\n" in gone.stdout
    (tmp_path / "x.bin").write_bytes(b"12345678")
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0 and then nothing that makes sense, but long enough")
    damaged = hp_muon("plan", *wanted, "data.vocab_size=300", "data.path=[x,y]", folder=tmp_path)
    assert damaged.returncode == 2
    assert "x.idx" in damaged.stderr
    unknown = hp_muon("plan", *wanted, folder=tmp_path)
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("hp-muon: data.vocab_size=None: is not known for your own dataset")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "optimizer.momentm=0.3"],
        ["train", "topology.ranks=0", "run.micro_batch_size=0"],
        ["plan", "dp=hp_fsdp", "topology.ranks=4", "model=tiny_dense"],
        ["train", "--cfg", "job", "run.seed=7"],
        ["train", "hydra.run.dir=here", "--dry-run"],
        ["trian"],
        [],
    ],
)
def test_a_command_that_these_tests_fork_is_the_command(arguments: list[str], tmp_path: Path) -> None:
    """Most tests here run it without the start of an interpreter."""
    folders = [tmp_path / "forked", tmp_path / "alone"]
    for folder in folders:
        folder.mkdir()
    forked, alone = (
        run(*arguments, folder=folder) for run, folder in zip((hp_muon, hp_muon_alone), folders, strict=True)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    left = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in folders]
    assert left[0] == left[1]


@pytest.mark.skipif(metadata.version("omegaconf") >= "2.4", reason="this OmegaConf fills a part that is null")
def test_a_part_cannot_be_written_into_a_model_without_it(tmp_path: Path) -> None:
    done = hp_muon("train", "model.mla={q_lora_rank:16}", folder=tmp_path)
    assert done.returncode == 2
    assert "hp-muon: model.mla={q_lora_rank:16}: the chosen model has no model.mla" in done.stderr


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
        (
            {"HP_MUON_START": "forked"},
            "HP_MUON_START=forked: is no way to start ranks\n  fix: unset it, or choose among",
        ),
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
    assert done.stdout.count("Muon step of ") == 3
    assert "linear_kv_down_proj" in done.stdout
    dense = hp_muon("train", "--dry-run", "model=tiny_mla", "model.moe=null", folder=tmp_path)
    assert dense.returncode == 0, dense.stderr
    assert "experts" not in dense.stdout.partition("parameter ")[2]


def test_plan_says_how_tensor_parallel_matrices_go_and_what_that_sends(tmp_path: Path) -> None:
    arguments = ["model=tiny_dense", "topology.ranks=2", "topology.tp=2"]
    modes = "optimizer.tp_mode=duplicated,distributed,owner,blockwise"
    done = hp_muon("train", "--dry-run", "-m", *arguments, modes, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stdout.split("(the busiest), optimizer.tp_mode=")[1:]
    assert "made whole on every rank over tp (2 ranks): 1x all-gather (" in text[0]
    assert "never gathered, Gram matrices summed over tp (2 ranks): 1x all-gather (" in text[1]
    assert re.search(r"1x all-reduce \([\d,]+ bytes received\); ", text[1])
    assert re.search(r"\d+ because cut along the short side \(\d+\)", text[1])
    assert "each made whole on one rank that owns it over tp (2 ranks): 2x all-to-all (" in text[2]
    assert "times the mean:\n    rank 0: short side" in text[2]
    assert "an approximation, not Muon's update" in text[3]
    refused = hp_muon("plan", *arguments, "optimizer.tp_mode=ring", folder=tmp_path)
    assert "expected one of [duplicated, distributed, owner, blockwise]" in refused.stderr


def test_plan_says_what_ranks_with_the_same_weights_divide(tmp_path: Path) -> None:
    """A dry run said that every rank orthogonalises everything, and did not know optimizer.divide_replicas."""
    arguments = ["model=tiny_moe", "topology.ranks=4", "topology.ep=2"]
    choices = "optimizer.divide_replicas=null,true,false"
    done = hp_muon("train", "--dry-run", "-m", *arguments, choices, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    default, divided, apart = done.stdout.split("ranks that hold the same weights, optimizer.divide_replicas=")[1:]
    assert default.startswith("null, planned for cpu:\n    all ms are at 50 GFLOP/s, 1 GB/s")
    for text in (default, divided):
        dense, experts = text.split("routed experts over expert_dp, 2 ranks:")
        assert dense.count("        rank ") == 4
        assert experts.count("        rank ") == 2
        assert "max/mean 1.000; undivided 3.020 GFLOP on every rank" in experts
        assert "arriving at the rank with most: 2 broadcast 1.500 MiB (0 undivided); " in experts
    assert "rank 0: " not in apart
    assert "arriving at the rank with most: 0 broadcast 0.000 MiB" in apart
    replicas = ["dp=hp_hsdp", "dp.outer=replicate", "topology.ranks=4"]
    hybrid = hp_muon("train", "--dry-run", "-m", "model=tiny_dense", *replicas, choices, folder=tmp_path)
    *divided_ones, undivided = hybrid.stdout.split("Muon step of pipeline stage 0, ")[1:]
    for text, choice in zip(divided_ones, ("null", "true"), strict=True):
        assert text.startswith("all 2 replicas together, planned for cpu:")
        assert f"over the fast link (dp.outer=replicate, optimizer.divide_replicas={choice})" in text
        assert ", 2 broadcast 0." in text
    assert "each of the 2 replicas updates all of it (dp.outer=replicate, optimizer.divide_replicas=false)" in undivided
    assert "broadcast" not in undivided


def test_plan_says_what_begins_while_backward_runs(tmp_path: Path) -> None:
    arguments = ["model=tiny_dense", "dp=hp_fsdp", "topology.ranks=1,4", "optimizer.clip_mode=adamw_only"]
    done = hp_muon("train", "--dry-run", "-m", *arguments, "optimizer.overlap_backward=false,true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "(optimizer.overlap_backward)" in line]
    assert lines == [
        "  nothing is exchanged that could begin while backward runs (optimizer.overlap_backward)",
        "  exchanges over dp that begin while backward runs: 1 of 1 (optimizer.overlap_backward)",
    ]


def test_hydras_flags_stand_anywhere(tmp_path: Path) -> None:
    """`-m` behind an override was "unrecognized arguments"."""
    done = hp_muon("train", "run.steps=50", "-m", "optimizer.lr=0.1,0.2", "run.dry=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps      50") == 2
    shown = hp_muon("train", "run.steps=50", "--cfg", "job", "run.seed=7", folder=tmp_path)
    assert "seed: 7" in shown.stdout


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


def test_the_plan_of_shards_tells_routes_prices_and_balance(tmp_path: Path) -> None:
    overrides = ["model=tiny_dense", "dp=hp_fsdp", "topology.ranks=4"]
    shown = hp_muon("plan", *overrides, folder=tmp_path).stdout.partition("Muon step")[2]
    assert "all ms are at 50 GFLOP/s, 1 GB/s and 200 us a message of a rank (default for CPU)" in shown
    assert "weights over dp, 4 ranks, fast link:" in shown
    assert "8 x gate/up [352,128]: alltoall" in shown
    assert "whole on a rank, nothing is sent" in shown
    assert "all-to-all peers (queue pairs) of the rank with most: 3" in shown
    assert "prediction at these rates" in shown
    slow = ["optimizer.rates.bytes_per_s=1e6", "optimizer.rates.message_s=0", "topology.ranks_per_supernode=2"]
    slow.append("optimizer.rates.replica_bytes_per_s=1e5")
    shown = hp_muon("plan", *overrides, *slow, folder=tmp_path).stdout
    rates = "50 GFLOP/s, 0.001 GB/s (0.0001 GB/s from replicas) and 0 us a message of a rank"
    assert f"{rates} (optimizer.rates, else default for CPU)" in shown
    assert "weights over dp, 4 ranks, slow link:" in shown
    scarce = hp_muon("plan", *overrides, "optimizer.max_peers=1", folder=tmp_path).stdout
    assert "[352,128]: alltoall" not in scarce
    wrong = hp_muon("plan", *overrides, "optimizer.rates.flops_per_s=0", folder=tmp_path)
    assert wrong.returncode == 2
    assert "optimizer.rates.flops_per_s=0: must be greater than 0" in wrong.stderr


def test_dense_layers_below_experts(tmp_path: Path) -> None:
    shown = hp_muon("plan", "model=tiny_moe", "model.moe.first_dense_layers=1", folder=tmp_path).stdout
    assert "decoder.layers.0.mlp.linear_fc1.weight" in shown
    wrong = hp_muon("plan", "model=tiny_moe", "model.moe.first_dense_layers=4", folder=tmp_path)
    assert wrong.returncode == 2
    assert "leaves none of model.num_layers=4 layers to the experts" in wrong.stderr


def test_unknown_commands_and_help() -> None:
    done = subprocess.run([*CLI, "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no command 'trian'" in done.stderr
    helped = subprocess.run([*CLI, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0
    assert "hp-muon COMMAND" in helped.stdout


def test_plan_is_the_dry_run_and_warns_of_shard_groups_that_leave_their_supernode(tmp_path: Path) -> None:
    overrides = ["dp=hp_fsdp", "topology.ranks=8", "topology.ep=2"]
    done = hp_muon("plan", *overrides, folder=tmp_path)
    assert done.returncode == 0
    assert "warning" not in done.stdout
    assert done.stdout == hp_muon("train", "--dry-run", *overrides, folder=tmp_path).stdout
    crossing = hp_muon("plan", *overrides, "topology.ranks_per_supernode=4", folder=tmp_path).stdout
    assert "(data-parallel shards)=8: the shard group of 8 ranks covers 2 supernodes" in crossing
    assert "(expert-data-parallel shards)=4" in crossing
    assert "fix: shard over 4 ranks and replicate over 2" in crossing
    inside = hp_muon("plan", *overrides, "dp.replicas=2", "topology.ranks_per_supernode=4", folder=tmp_path)
    assert "warning" not in inside.stdout
