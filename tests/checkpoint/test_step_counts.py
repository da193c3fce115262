"""The place of Adam's step count survives: torch, the fused Adams and MindSpeed's each look in one place only."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hp_muon_plugin.checkpoint.canonical import Info, Key, RunState, Source, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.checkpoint.step_counts import FACT, StepPlace, live_step
from hp_muon_plugin.errors import ConfigError
from tests.checkpoint.fixtures import MadeUp
from tests.checkpoint.others import written

NAME = "decoder.layers.0.mlp.linear_fc2.weight"
FORMATS = ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor", "fsdp2", "hyper_parallel", "hp"]
HYPER = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0}


def _source(place: str | None, **hyper: Any) -> MadeUp:
    infos = {Key(NAME, "weight"): Info((8, 4), torch.float32)}
    infos |= {Key(NAME, kind): Info((8, 4), torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
    model = {} if place is None else {FACT: str(place)}
    return MadeUp(infos, RunState(iteration=3, hyper={NAME: HYPER | hyper}, steps={NAME: 3.0}, model=model))


def _groups(folder: Path, to: str, sharding: str) -> tuple[list[dict[str, Any]], Any]:
    """Param groups of the file, and the optimizer state beside them."""
    if to == "torch":
        saved = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["optimizer"]
    else:
        saved = torch.load(folder / "common.pt", weights_only=False)["optimizer"]
    inner = saved.get("optimizer", saved)
    return inner["param_groups"], inner.get("state", {})


@pytest.mark.parametrize("via", FORMATS)
@pytest.mark.parametrize("place", list(StepPlace))
@pytest.mark.parametrize("first", ["torch", "torch_dist"])
@pytest.mark.parametrize("distributed", [True, False])
def test_place_survives_every_format(distributed: bool, first: str, place: StepPlace, via: str, tmp_path: Path) -> None:
    forms = {"torch": ("plain", "distributed"), "torch_dist": ("none", "fully_reshardable")}[first]
    target = Target(sharding=forms[distributed])
    source = written(_source(place), first, tmp_path / "first", target)
    other = written(source, via, tmp_path / "via", target if via == first else None)
    back = written(other, first, tmp_path / "back", target)
    for found in (source, other, back):
        assert found.state().steps == {NAME: 3.0}
        assert "step" not in found.state().hyper[NAME]
    assert source.state().model[FACT] == back.state().model[FACT] == place
    (group,), state = _groups(tmp_path / "back", first, forms[distributed])
    if distributed or place is not StepPlace.parameter:
        assert type(group["step"]) is (torch.Tensor if place is StepPlace.group_tensor else int)
        assert group["step"] == 3
        assert not any("step" in str(key) for key in [*state, *(state.get(0) or {})])
    else:
        assert "step" not in group
    assert group.get("bias_correction", False) is (place is not StepPlace.parameter)


def test_float_in_a_group_is_torchs_own_count(tmp_path: Path) -> None:
    """DistributedOptimizer over torch's AdamW writes it so; without one the count goes back to the parameter."""
    target = Target(sharding="distributed")
    _saved_with(tmp_path, 3.0, target)
    source = open_checkpoint(tmp_path / "first")
    assert source.state().model[FACT] == StepPlace.parameter
    written(source, "torch", tmp_path / "plain", Target(sharding="plain"))
    (group,), state = _groups(tmp_path / "plain", "torch", "plain")
    assert "step" not in group
    assert state[0]["step"] == 3


def _saved_with(folder: Path, step: Any, target: Target) -> Source:
    """A legacy checkpoint whose groups hold a step of some type, saved by torch itself."""
    written(_source(None), "torch", folder / "first", target).close()
    file = folder / "first" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    del saved["hp_muon"]
    inner = saved["optimizer"].get("optimizer", saved["optimizer"])
    for group in inner["param_groups"]:
        group["step"] = step
    for state in inner.get("state", {}).values():
        state.pop("step")
    file.unlink()
    torch.save(saved, file)
    return open_checkpoint(folder / "first")


@pytest.mark.parametrize("sharding", ["distributed", "plain"])
@pytest.mark.parametrize("step", [torch.tensor(3), torch.tensor([3]), 3])
def test_steps_that_fused_optimizers_saved_are_read(step: Any, sharding: str, tmp_path: Path) -> None:
    source = _saved_with(tmp_path, step, Target(sharding=sharding))
    assert source.state().steps == {NAME: 3.0}
    expected = StepPlace.group_tensor if isinstance(step, torch.Tensor) else StepPlace.group
    assert source.state().model[FACT] == expected


@pytest.mark.parametrize("to", ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"])
def test_option_names_the_place(to: str, tmp_path: Path) -> None:
    target = Target(options={"step": "group"})
    assert written(_source(None), to, tmp_path / "out", target).state().model[FACT] == StepPlace.group
    with pytest.raises(ConfigError, match="--option step"):
        written(_source(None), to, tmp_path / "wrong", Target(options={"step": "somewhere"}))


def test_a_count_left_behind_is_not_taken() -> None:
    assert live_step(3, torch.tensor(7.0), None) == 7.0
    assert live_step(None, None) is None
