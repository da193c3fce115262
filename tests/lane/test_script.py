"""Somebody else's Megatron script with the plugin, through upstream's own trainer."""

import re
from pathlib import Path
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.megatron.versions import core_version
from lane.script_runs import MOCK, MOE, SCRIPT, SMALL, Outcome, rank_of_script, script, shared_script

# Every run goes through upstream's pretrain(), whose start alone takes seconds on each rank.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_EP2 = [*MOE, "--expert-model-parallel-size", "2"]


def _native(*model: str) -> Outcome:
    return shared_script(2, *MOCK, *model, "--optimizer", "adam")


@pytest.mark.parametrize("model", [[], _EP2], ids=["dense", "moe"])
def test_the_validation_loss_over_shards_is_native_ddps_to_all_digits(model: list[str]) -> None:
    native, sharded = _native(*model), shared_script(2, *MOCK, *model, "--optimizer", "adam", "--hp-dp", "hp_fsdp")
    assert (native.code, sharded.code) == (0, 0)
    assert sharded.validation == native.validation
    assert sharded.losses == native.losses
    assert sharded.norms == native.norms


def test_muon_over_megatrons_wrapper_and_over_shards_gives_the_same_losses() -> None:
    """Four ranks, two replicas of two shards, the scripts' older way to build a model."""
    over_ddp = shared_script(4, *MOCK, *_EP2, "--model-path", "provider", "--optimizer", "hp_muon")
    over_shards = shared_script(4, *MOCK, *_EP2, "--model-path", "provider", "--", "dp=hp_hsdp", "optimizer=hp_muon")
    assert "in the place of every optimizer" in over_ddp.text
    assert "sharded: 2 replicas, outer=shard" in over_shards.text
    assert over_ddp.validation == over_shards.validation
    assert over_ddp.losses == over_shards.losses
    assert len(set(over_ddp.norms)) == 4


def test_the_older_and_the_newer_way_to_build_a_model_train_alike() -> None:
    builder = shared_script(2, *MOCK, "--hp-dp", "hp_fsdp")
    provider = shared_script(2, *MOCK, "--hp-dp", "hp_fsdp", "--model-path", "provider")
    assert (builder.validation, builder.losses, builder.norms) == (provider.validation, provider.losses, provider.norms)
    assert builder.losses[0] == _native().losses[0]
    assert builder.losses[1:] != _native().losses[1:]  # it is another optimizer


def _megatron_data(folder: Path) -> list[str]:
    """A dataset in Megatron's own form."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "tokens"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    generator = torch.Generator().manual_seed(7)
    for _ in range(40):
        builder.add_document(torch.randint(0, 120, (50,), generator=generator), [50])
    builder.finalize(f"{prefix}.idx")
    return ["--data-path", str(prefix), "--data-cache-path", str(folder / "cache")]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ["--optimizer", "hp_muon"]), (2, ["--bf16", "--hp-dp", "hp_fsdp"])],
    ids=["ddp", "fsdp-bf16"],
)
def test_a_run_that_upstream_saved_and_resumed_is_the_run_itself(
    ranks: int, options: list[str], tmp_path: Path
) -> None:
    """Both runs read .bin/.idx files; the second starts from what the first one's second step left."""
    folder = ["--save", str(tmp_path / "ckpt"), "--ckpt-format", "torch_dist"]
    data = [*_megatron_data(tmp_path), *_EP2]
    straight = script(ranks, *data, *folder, "--save-interval", "2", *options)
    assert straight.code == 0, straight.text[-2000:]
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = script(ranks, *data, *folder, "--save-interval", "9", "--load", str(tmp_path / "ckpt"), *options)
    assert resumed.code == 0, resumed.text[-2000:]
    assert "successfully loaded checkpoint" in resumed.text
    assert resumed.losses[0] == straight.losses[2]  # upstream prints the mean of both steps as the second one
    assert resumed.norms == straight.norms[2:]
    assert resumed.validation == straight.validation


def test_a_script_on_one_rank_needs_no_launcher(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    from lane.script_runs import require_training

    require_training()
    command = [sys.executable, "-m", "hp_muon_plugin.run", SCRIPT, *SMALL, *MOCK, "--hp-muon-momentum", "0.9"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "validation loss at iteration 4" in done.stdout
    assert "added to the script's arguments: --optimizer adam --no-gradient-accumulation-fusion" in done.stderr


def _bypass(folder: Path, text: str) -> str:
    path = folder / "user_script.py"
    path.write_text(text)
    return str(path)


def test_a_script_that_goes_around_the_plugin_is_told(tmp_path: Path) -> None:
    path = _bypass(tmp_path, "import megatron.training\nprint('nothing trained')\n")
    outcome = script(1, path=path, small=False)
    assert outcome.code == 2
    assert "nothing trained" in outcome.text
    assert "the trainer built its optimizer by another way" in outcome.text
    relaxed = script(1, "--", "strict=false", path=path, small=False)
    assert relaxed.code == 0
    assert "warning: hp_muon was installed" in relaxed.text


def test_a_script_that_ends_with_sys_exit_is_told_too(tmp_path: Path) -> None:
    """``sys.exit(main())`` went by the check, with exit code 0; a script's own error was followed by ours."""
    path = _bypass(
        tmp_path, "import sys\nif '--help' in sys.argv: print('mine')\nsys.exit(int('--bad' in sys.argv) * 7)\n"
    )
    outcome = script(1, path=path, small=False)
    assert outcome.code == 2
    assert "the trainer built its optimizer by another way" in outcome.text
    for flag, code in (("--bad", 7), ("--help", 0)):
        with pytest.raises(Exception, match=f"SystemExit: {code}|SystemExit\\({code}"):
            script(1, flag, path=path, small=False)


def test_the_documents_command_trains(tmp_path: Path) -> None:
    """It lacked --eval-interval, without which megatron.training fails with a TypeError."""
    text = (Path(__file__).parents[2] / "docs" / "megatron_run.md").read_text(encoding="utf-8")
    line = next(
        part for part in text.replace("\\\n", " ").splitlines() if "recipes/pretrain/pretrain_gpt.py --mock" in part
    )
    _, _, words = line.partition("recipes/pretrain/pretrain_gpt.py ")
    assert "--nproc-per-node 2 -m hp_muon_plugin.run" in line
    outcome = script(2, *words.split(), small=False)
    assert outcome.code == 0, outcome.text[-2000:]
    assert float(outcome.validation) < 4.5


def test_a_models_own_refusal_is_one_message() -> None:
    outcome: Any = script(2, *MOCK, "--hp-dp", "hp_fsdp", "--overlap-param-gather")
    assert outcome.code == 2
    assert "hp-muon: --overlap-param-gather=True: belongs to the distributed optimizer" in outcome.text


@pytest.mark.parametrize("module", ["megatron.training.not_there", "megatron.core.not_there"])
def test_a_script_of_another_megatron_is_one_message(module: str, tmp_path: Path) -> None:
    """It was a traceback of every rank: most wheels have no trainer, and pip takes such a one on Python 3.11."""
    path = tmp_path / "pretrain.py"
    path.write_text(f"import {module}\n")
    code, text = run_ranks(1, rank_of_script, (str(path),))[0]
    assert code == 2
    said = rf"SCRIPT={path}: imports megatron\.[\w.]+, which the installed megatron-core {core_version()} does not have"
    assert re.search(said, text), text
    assert "fix: put the Megatron-LM that the script is of on PYTHONPATH" in text
