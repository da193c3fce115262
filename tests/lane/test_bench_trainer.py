"""``hp-muon bench trainer`` on two ranks: everyone trains the same, and rows say who is how fast."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.bench import trainer
from hp_muon_plugin.bench.trainer_cases import ALONE, OURS, model_of, peers, train_of
from hp_muon_plugin.bench.trainer_rank import Plan
from hp_muon_plugin.cli.bench import run
from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.data_parallel import MegatronFsdp
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import dense, train_config, wrapped_model


@pytest.mark.once
@pytest.mark.slow  # starts two real ranks
def test_rows_hold_ours_every_peer_the_ratio_and_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "moe32x1", "--ranks", "2", "--seconds", "0.1", "--out", str(tmp_path)]
    assert run(["trainer", *options]) == 0
    rows = json.loads((tmp_path / "trainer.json").read_text(encoding="utf-8"))["rows"]
    assert [row["clock"] for row in rows] == ["wall", "cpu"]
    for row in rows:
        assert set(row["peers"]) == {"megatron_ddp", "torch_fsdp2", "megatron_fsdp", ALONE}
        assert row["ratio"] == min(row["ratios"]["torch_fsdp2"], row["ratios"]["megatron_fsdp"])
        assert row["floor"] == row["peers"][ALONE]
        assert "WRONG" not in row["notes"]
        assert row["notes"]["rounds"] >= 5
    assert "ratio" in capsys.readouterr().out


@pytest.mark.once
def test_who_differs_or_fails_is_told_and_has_no_part_in_the_ratio(tmp_path: Path) -> None:
    times = {name: [[1.0, 1.0], [2.0, 2.0]] for name in (OURS, "megatron_ddp", "torch_fsdp2", "megatron_fsdp", ALONE)}
    times["torch_fsdp2"] = [[0.5, 0.5], [0.5, 0.5]]
    losses = {OURS: [3.0, 2.0], "megatron_ddp": [3.0, 2.0], "torch_fsdp2": [3.0, 2.1], "megatron_fsdp": [3.0, 2.0]}
    found = {"times": times, "losses": losses, "failed": {"hp_hsdp": "RuntimeError: no"}}
    (tmp_path / "found0.0.json").write_text(json.dumps(found), encoding="utf-8")
    row = trainer.rows(Plan(["dense32x1"], "adamw", "fp32", 1.0, 1.0), tmp_path, num_ranks=1)[0]
    assert row.notes["WRONG"] == "torch_fsdp2"
    assert row.notes["hp_hsdp failed"] == "RuntimeError: no"
    assert row.ratio == 1.0


@pytest.mark.once
@pytest.mark.parametrize("optimizer", ["adamw", "hp_muon"])
def test_every_contender_is_a_valid_run(optimizer: str) -> None:
    config = train_of(model_of("moe64x2", "--only"), optimizer, "bf16", 4)
    found = peers(config)
    assert ("megatron_fsdp" in found) is (optimizer == "adamw")
    assert "hp_hsdp" in found
    for dp in found.values():
        config.dp = dp
        check_train(config, world_size=4)


@pytest.mark.once
@pytest.mark.parametrize("text", ["dense", "dense33x1", "moe32x0", "mla32x1"])
def test_a_wrong_case_names_itself(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trainer", "--only", text]) == 2
    assert f"--only={text}" in capsys.readouterr().err


@pytest.mark.skipif(core_version().lane >= (0, 16), reason="later versions leave the class of parameters alone")
def test_megatron_fsdp_leaves_the_gradients_of_other_models_alone() -> None:
    """It made ``main_grad`` a property of all parameters, and the next model had no gradients."""
    assert run_ranks(1, _beside_megatron_fsdp) == [["own", "later", "none", True]]


def _beside_megatron_fsdp(launch: Launch) -> list[Any]:
    before, after = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    before.main_grad = "own"  # type: ignore[attr-defined]
    wrapped = wrapped_model(launch, train_config(dense(), dp=MegatronFsdp(), optimizer=AdamW()))  # type: ignore[arg-type]
    after.main_grad = "later"  # type: ignore[attr-defined]
    found = [parameter.main_grad for parameter in (before, after)]  # type: ignore[attr-defined]
    del after.main_grad
    taken = [parameter for parameter in wrapped.parameters() if hasattr(parameter, "_gbuf")]
    return [*found, getattr(after, "main_grad", "none"), bool(taken) and taken[0].main_grad.shape == taken[0].shape]
