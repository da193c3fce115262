"""The figures in the README are what the kept raw logs say."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes" / "demo"))

import results  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
SWEEP_README = (ROOT / "recipes" / "demo" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("optimizer", ["hp_muon", "adamw"])
def test_the_best_rate_is_inside_the_sweep_not_at_its_edge(optimizer: str) -> None:
    rates = sorted(results.sweep_logs(optimizer))
    assert len(rates) >= 4
    assert results.best_lr(optimizer) not in (rates[0], rates[-1])


@pytest.mark.parametrize("optimizer", ["hp_muon", "adamw"])
def test_every_rate_of_the_table_is_what_its_log_says(optimizer: str) -> None:
    for rate, log in results.sweep_logs(optimizer).items():
        assert len(log.train) == 150
        assert re.search(rf"\| {optimizer} \| {rate:g} \| \**{log.final:.3f}", SWEEP_README), (rate, log.final)


def test_the_readme_says_how_many_steps_muon_takes() -> None:
    muon = results.sweep_logs("hp_muon")[results.best_lr("hp_muon")]
    adamw = results.sweep_logs("adamw")[results.best_lr("adamw")]
    steps = results.step_reaching(muon, adamw.final)
    assert steps is not None
    assert steps < 150
    sentence = (
        f"reaches AdamW's final held-out loss ({adamw.final:.3f} nats per byte after 150 steps) after {steps:.0f}"
    )
    assert sentence in " ".join(README.split())
    assert f"ends at {muon.final:.3f}" in " ".join(README.split())
    assert muon.final < 0.6 * muon.unigram


def test_reaching_is_interpolated_between_evaluations() -> None:
    log = results.RunLog({}, {10: 3.0, 20: 2.0, 30: 1.0}, 3.2)
    assert results.step_reaching(log, 1.5) == pytest.approx(25.0)
    assert results.step_reaching(log, 2.0) == pytest.approx(20.0)
    assert results.step_reaching(log, 0.5) is None
