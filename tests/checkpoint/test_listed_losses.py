"""What ``--drop`` lets go is what the plan lists: all else is still compared with the source."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hp_muon_plugin.bench.made_up import MadeUp, gpt
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Loss, RunState, Target
from hp_muon_plugin.checkpoint.convert import convert, plan
from hp_muon_plugin.checkpoint.formats import FORMATS, open_checkpoint
from hp_muon_plugin.checkpoint.step_counts import StepPlace
from hp_muon_plugin.errors import ConfigError, VerifyError
from tests.checkpoint.fixtures import made_up
from tests.checkpoint.others import fixture

COUNT = 2.0**24 + 1
WHOLE = {"hp", "torch_dist", "torch"}
"""Formats that have an integer, whatever the source had."""
MEGATRON = {"torch_dist", "torch", "torch_dcp", "fsdp_dtensor"}
"""Formats that list the random state which a source has not."""
CHOSEN = {"torch_dcp", "fsdp_dtensor", "torch plain"}
"""Formats that have one if the steps stand in groups."""


def source_at(count: float, place: StepPlace, *, has_random: bool) -> MadeUp:
    source = made_up(1, layers=1) if has_random else gpt(1, hidden=16)
    state = source.state()
    state.steps = dict.fromkeys(state.steps, count)
    state.model = {**state.model, "step_place": str(place)}
    if has_random:
        states = dict.fromkeys(("random_rng_state", "cuda_rng_state", "rng_tracker_states"), {})
        kept = {"torch_rng_state": torch.arange(16, dtype=torch.uint8), "np_rng_state": ("MT19937", [0], 0, 0, 0.0)}
        state.random = {"pp0.tp0": {"states": {**states, **kept}}}
    return source


@pytest.mark.parametrize("place", list(StepPlace))
@pytest.mark.parametrize("to", [*sorted(set(FORMATS) - {"hf"}), "torch plain"])
def test_a_count_that_float32_cannot_hold_is_kept_or_listed(to: str, place: StepPlace, tmp_path: Path) -> None:
    """--drop for a random state let 2**24 + 1 steps become 2**24 in silence."""
    form, _, sharding = to.partition(" ")
    target = Target(sharding=sharding or None)
    is_kept = to in WHOLE or (to in CHOSEN and place is not StepPlace.parameter)
    for has_random in (False, True):
        source = source_at(COUNT, place, has_random=has_random)
        found = plan(source, form, target)
        listed = [line for line in found.losses if line.steps]
        if form in MEGATRON:
            assert any("random state" in line for line in found.losses) is not has_random
        assert ("16777217 is 16777216" in "".join(listed)) is not is_kept
        if listed:
            with pytest.raises(ConfigError, match="16777217 is 16777216"):
                convert(found, tmp_path / "no")
        report = convert(found, tmp_path / f"{has_random}", drop=True)
        assert set(open_checkpoint(report.folder).state().steps.values()) == {COUNT if is_kept else 2.0**24}
        assert report.body["losses"] == list(found.losses)
        assert set(open_checkpoint(report.folder).state().steps) == set(source.state().steps)


def no_moment(source: MadeUp, state: RunState) -> None:
    del source._infos[Key("decoder.final_layernorm.weight", Kind.exp_avg)]


def another_iteration(source: MadeUp, state: RunState) -> None:
    state.iteration += 1


def another_step(source: MadeUp, state: RunState) -> None:
    state.steps["decoder.final_layernorm.weight"] += 1


def no_step(source: MadeUp, state: RunState) -> None:
    del state.steps["decoder.final_layernorm.weight"]


@pytest.mark.parametrize("is_lossy", [False, True])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (no_moment, "lacks exp_avg/decoder.final_layernorm.weight"),
        (another_iteration, "is at iteration 8, the source at 7"),
        (another_step, "step count of decoder.final_layernorm.weight is 8.0, not 7.0"),
        (no_step, "step count of decoder.final_layernorm.weight is None, not 7.0"),
    ],
)
def test_one_loss_excuses_no_other(
    harm: Callable[[MadeUp, RunState], None],
    message: str,
    is_lossy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any loss that was agreed to switched off the comparison of everything that can be lost."""
    found = plan(made_up(1, layers=1), "hp", Target())
    losses = (Loss("random state of a rank"), Loss("steps of another", steps={"another"})) if is_lossy else ()
    object.__setattr__(found, "losses", losses)
    real = found.writer.write

    def harmed(_: object, *rest: object) -> None:
        other = made_up(1, layers=1)
        harm(other, other.state())
        real(other, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(found.writer, "write", harmed)
    with pytest.raises(VerifyError, match=message):
        convert(found, tmp_path / "out", drop=True)
    assert not (tmp_path / "out").exists()


def test_what_a_loss_names_may_be_missing(tmp_path: Path) -> None:
    """Hugging Face has weights only: each thing that is gone is listed with what it excuses."""
    source = open_checkpoint(fixture("megatron_fsdp019/moehet_ep2_dp2", tmp_path) / "ckpt")
    found = plan(source, "hf", Target())
    told = {kind for line in found.losses for kind in line.kinds}
    assert told == {Kind.main, Kind.exp_avg, Kind.exp_avg_sq}
    report = convert(found, tmp_path / "out", drop=True)
    assert {name.partition("/")[0] for name in report.dropped} == told
    assert not all(line.has_iteration for line in found.losses)
