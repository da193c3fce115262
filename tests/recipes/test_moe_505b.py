"""The 505B recipe: its plan, its two ways to start, and the divided model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asked_of_torchrun import asked_of_torchrun
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hp_muon_plugin.config.train_options import typed_train
from hp_muon_plugin.config.trainer import Train
from hp_muon_plugin.train.adaptor import megatron_arguments

RECIPE = Path(__file__).parents[2] / "recipes" / "moe_505b"
README = (RECIPE / "README.md").read_text(encoding="utf-8")
CLI = [sys.executable, "-m", "hp_muon_plugin.cli.main"]
NODE = {"MASTER_ADDR": "node0", "NODE_RANK": "3"}


def _composed(name: str) -> Any:
    with initialize_config_dir(str(RECIPE), version_base="1.3"):
        return compose(name)


def _typed(name: str) -> Train:
    return typed_train(_composed(name))


def _values(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path: node}
    return {key: value for name, below in node.items() for key, value in _values(below, f"{path}.{name}").items()}


def _flags(line: list[str]) -> dict[str, str | bool]:
    """Megatron's arguments by their names."""
    found: dict[str, str | bool] = {}
    for word, after in zip(line, [*line[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:].replace("-", "_")] = True if after.startswith("--") else after
    return found


@pytest.fixture(scope="module")
def plan() -> str:
    command = re.search(r"^hp-muon (plan .*)$", README, re.MULTILINE)
    assert command is not None
    done = subprocess.run(
        [*CLI, *command[1].split()], capture_output=True, text=True, cwd=RECIPE.parents[1], check=True, timeout=60
    )
    return done.stdout


def test_the_plan_is_the_one_of_the_readme(plan: str) -> None:
    for figure in (
        "504,562,283,520 parameters",
        "1,314,058,256 elements, padding 0.05%; 2 replicas, outer=shard",
        "max/mean 1.021",
        "max/mean 1.370",
        "prediction at these rates: 808 ms",
    ):
        assert figure in plan
        number = re.search(r"[\d,.]{3,}", figure)
        assert number is not None
        assert number[0].strip(",") in README
    arriving = re.findall(r"from (?:the shard group|other replicas): ([\d.]+) MiB of weights, ([\d.]+) MiB", plan)
    assert [[round(float(mib) / 1024, 1) for mib in pair] for pair in arriving] == [[503.1, 255.6], [1.2, 2.4]]
    assert "experts 48 x 27,525,120 (padding 0.00%)" in plan
    experts = plan.split("routed experts over")[1].split("owners:")[0]
    assert experts.count("whole on a rank, nothing is sent") == 2


def test_the_divided_model_differs_in_sizes_alone() -> None:
    full, small = (_values(OmegaConf.to_container(_composed(name))) for name in ("moe_505b", "small"))
    assert set(full) == set(small)
    other = {name for name in full if full[name] != small[name] and not name.startswith((".model.", ".run."))}
    assert other == {
        ".data.kind", ".data.vocab_size", ".platform.name", ".platform.precision", ".topology.ranks", ".topology.ep",
        ".topology.ranks_per_supernode", ".topology.timeout_s", ".optimizer.lr", ".lr_schedule.warmup_steps",
        ".monitor.interval", ".checkpoint.every", ".checkpoint.keep", ".checkpoint.asynchronous", ".checkpoint.resume",
    }  # fmt: skip
    kept = {name for name in full if name.startswith(".model.") and full[name] == small[name]}
    assert {".model.qk_layernorm", ".model.tie_embeddings", ".model.rotary_base"} <= kept


@pytest.mark.parametrize(("size", "config"), [("full", "moe_505b"), ("small", "small")])
def test_the_megatron_script_is_given_the_sizes_of_the_recipe(size: str, config: str, tmp_path: Path) -> None:
    flags = _flags(asked_of_torchrun(RECIPE / "pretrain.sh", tmp_path, SCRIPT="pretrain_gpt.py", SIZE=size, **NODE))
    wanted = megatron_arguments(_typed(config))
    is_small = size == "small"
    left_out = {
        "group_query_attention",
        "num_query_groups",
        "transformer_impl",
        "fp16",
        "sequence_parallel",
        "optimizer",
    }
    defaults = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}
    defaults |= {"expert_tensor_parallel_size", "reset_attention_mask"} | ({"bf16", "moe_grouped_gemm"} & set(wanted))
    for name, value in wanted.items():
        if name in left_out or (name in defaults and not flags.get(name)):
            assert value in (1, False) or name in left_out
            continue
        assert flags[name] == (value if value is True else str(value)), name
    train = _typed(config)
    for name, value in vars(train.model.mla).items():
        assert flags[name] == str(value)
    dense = train.model.moe.first_dense_layers if train.model.moe else 0
    assert flags["moe_layer_freq"] == f"([0]*{dense}+[1]*{train.model.num_layers - dense})"
    assert int(str(flags["train_iters"])) == train.run.steps
    assert (float(str(flags["lr"])), float(str(flags["hp_muon_qk_clip"]))) == (train.optimizer.lr, 100)
    assert flags["hp_fsdp_replicas"] == str(train.dp.replicas)
    assert ("bf16" in flags) == (not is_small)


def test_a_node_is_started_with_its_place_and_what_the_user_adds(tmp_path: Path) -> None:
    line = asked_of_torchrun(RECIPE / "launch.sh", tmp_path, "data.path=/data/tokens", HCCL_EXEC_TIMEOUT="99", **NODE)
    assert line[:6] == ["--nnodes", "48", "--nproc-per-node", "16", "--node-rank", "3"]
    assert line[line.index("--config-name") + 1 :][:2] == ["moe_505b", "data.path=/data/tokens"]
    assert {"HCCL_EXEC_TIMEOUT=99", "HCCL_CONNECT_TIMEOUT=3600"} <= set(line)
    assert _typed("moe_505b").topology.ranks == 48 * 16


@pytest.mark.parametrize("script", ["launch.sh", "pretrain.sh"])
def test_a_node_without_a_place_is_told_what_to_set(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NODE}
    done = subprocess.run([str(RECIPE / script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "set MASTER_ADDR to the first node" in done.stderr


@pytest.mark.parametrize("script", ["launch.sh", "pretrain.sh"])
@pytest.mark.parametrize("way", ["link", "CDPATH"])
def test_a_node_is_started_from_anywhere(script: str, way: str, tmp_path: Path) -> None:
    """Through a link, or with a CDPATH, whose `cd` prints where it goes, environment.sh was not found."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    link = folder / script if way == "link" else folder / "recipe" / script
    target = RECIPE / script if way == "link" else RECIPE
    (link if way == "link" else link.parent).symlink_to(target)
    called = Path(script) if way == "link" else Path("recipe") / script
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
    torchrun.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SCRIPT": "my script.py", "CDPATH": str(folder), **NODE}
    done = subprocess.run(
        ["sh", str(called)], capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (str(RECIPE) if script == "launch.sh" else "my script.py") in done.stdout.splitlines()


@pytest.mark.parametrize("script", ["launch.sh", "pretrain.sh"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"NODE_RANK": "48"}, "NODE_RANK=48 NODES=48 DEVICES=16: nodes have numbers from 0 to NODES - 1"),
        ({"NODES": "0"}, "NODE_RANK=3 NODES=0"),
        ({"DEVICES": "0"}, "NODE_RANK=3 NODES=48 DEVICES=0"),
        ({"NODES": "all"}, "NODES=all: must be a number"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1: must be a number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: must be a number"),
    ],
)
def test_a_node_that_cannot_be_is_refused(script: str, wrong: dict[str, str], message: str) -> None:
    """torchrun waited for it, and the others with it."""
    variables = {**os.environ, "SCRIPT": "pretrain_gpt.py", **NODE, **wrong}
    done = subprocess.run(
        [str(RECIPE / script)], capture_output=True, text=True, env=variables, check=False, timeout=20
    )
    assert done.returncode == 2
    assert done.stderr.startswith(message)


def test_a_misspelt_size_is_refused() -> None:
    """It meant the whole model."""
    variables = {"SCRIPT": "pretrain_gpt.py", "SIZE": "smal", **NODE}
    command = [str(RECIPE / "pretrain.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    assert (done.returncode, done.stderr) == (2, "SIZE=smal: choose full, or small for the divided model\n")


def test_the_divided_model_learns(tmp_path: Path) -> None:
    command = [*CLI, "train", "--config-dir", str(RECIPE), "--config-name", "small"]
    overrides = ["run.steps=6", "run.log_interval=1", "run.eval_batches=1"]
    done = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, cwd=tmp_path, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "outputs" / "moe_505b_small" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [entry["loss/train"] for entry in map(json.loads, log) if "loss/train" in entry]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
