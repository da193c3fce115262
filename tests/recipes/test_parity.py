"""The figures of recipes/parity are what the kept raw logs say, and the claims hold in them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "recipes" / "parity"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def _figures() -> ModuleType:
    """By path: other recipes have neighbours of that name."""
    spec = importlib.util.spec_from_file_location("parity_figures", FOLDER / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures = _figures()
KEPT = {study: figures.kept_losses(study) for study in figures.STUDIES}


@pytest.mark.parametrize("study", figures.STUDIES)
def test_every_row_of_the_table_is_what_the_logs_say(study: str) -> None:
    assert list(KEPT[study]) == list(figures.STUDIES[study].runs)
    for losses in KEPT[study].values():
        assert len(losses) == figures.STUDIES[study].steps
        assert losses[-1] < 0.6 * losses[0]  # it trains
    for row in figures.rows(study, KEPT[study]):
        assert row in README


@pytest.mark.parametrize(("study", "limit"), [("dense_hp_muon", 1e-6), ("dense_adamw", 2e-5), ("moe_adamw", 1e-9)])
def test_float32_losses_of_100_steps_are_near(study: str, limit: float) -> None:
    first, *others = KEPT[study].values()
    assert all(figures.agreement(first, losses).relative < limit for losses in others)


@pytest.mark.parametrize("study", ["bf16", "strategies", "strategies_all_experts"])
def test_long_runs_correlate(study: str) -> None:
    first, *others = KEPT[study].values()
    assert all(figures.agreement(first, losses).r > 0.999997 for losses in others)


def test_no_strategy_over_experts_is_much_further_away_than_megatron_from_itself() -> None:
    """A last digit sends a token to another expert; Megatron's own wrapper on two ranks says what that does."""
    first, *others = KEPT["strategies_moe"].values()
    control = figures.agreement(first, others.pop())
    assert all(1 - figures.agreement(first, losses).r < 2 * (1 - control.r) for losses in others)


def test_an_agreement_is_told_from_a_difference() -> None:
    near = figures.agreement([3.0, 2.0, 1.0], [3.0, 2.0, 1.5])
    assert near.largest == pytest.approx(0.5)
    assert near.relative == pytest.approx(0.5)
    assert near.r == pytest.approx(0.98198, abs=1e-5)
