"""Schedules that half precision cannot compute."""

import pytest
import torch

from hp_muon_plugin.config.choices import FloatDtype, Schedule
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.algorithm import Algorithm, Form, choose
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz, orthogonalize
from hp_muon_plugin.muon.stability import is_stable, largest_value, schedule_and_table

NAMED = [schedule for schedule in Schedule if schedule is not Schedule.custom]
HALVES = [FloatDtype.bfloat16, FloatDtype.float16]
# Polar Express without its safety factor
BARE = [
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.51),
    (2.3007, -1.6689, 0.4188),
]


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("unit", [0.0, 2.0**-8])
def test_the_bound_is_that_of_a_fine_grid(schedule: Schedule, unit: float) -> None:
    rows, largest = resolve_schedule(schedule), 1.0 + unit
    for a, b, c in rows:
        s = torch.linspace(0, min(largest, 1e30), 100_001, dtype=torch.float64)
        largest = (1 + unit) * float((a * s + b * s**3 + c * s**5).abs().max())
    assert largest_value(rows, unit) == pytest.approx(largest, rel=1e-6)


def _steep() -> torch.Tensor:
    """Of rank 1, and falling by 1e4: what CANS in bfloat16 took to 1e34 and 8e9."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(2, 48, 160, generator=generator), full_matrices=False)
    values = torch.stack([torch.eye(48)[0], torch.logspace(0, -4, 48)])
    return left @ torch.diag_embed(values) @ right


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", Form)
def test_what_counts_as_stable_stays_in_its_band(form: Form, dtype: FloatDtype) -> None:
    stable = [schedule for schedule in NAMED if is_stable(resolve_schedule(schedule), dtype)]
    assert set(NAMED) - set(stable) == {Schedule.cans}
    for schedule in stable:
        engine = NewtonSchulz(resolve_schedule(schedule), Algorithm(form, dtype=dtype), device=torch.device("cpu"))
        assert float(torch.linalg.matrix_norm(orthogonalize(_steep(), engine), ord=2).max()) < 1.5, schedule


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "options", [{"schedule": "cans"}, {"schedule": "custom", "coefficients": BARE}], ids=["cans", "bare"]
)
def test_a_schedule_without_a_margin_is_refused_where_a_half_type_is_asked_for(
    options: dict[str, object], dtype: FloatDtype
) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.ns_dtype={dtype}: rounds singular values past 1"):
        build_optimizer(torch.nn.Linear(16, 16), ns_dtype=dtype, **options)
    build_optimizer(torch.nn.Linear(16, 16), **options)


@pytest.mark.parametrize("schedule", NAMED)
def test_the_table_computes_it_in_float32_where_nobody_asked(schedule: Schedule) -> None:
    _, table = schedule_and_table(HpMuon(schedule=schedule))
    expected = FloatDtype.float32 if schedule is Schedule.cans else FloatDtype.float16
    for device in ("cuda", "npu"):
        assert choose(device, 1024, 4096, table=table).dtype is expected
