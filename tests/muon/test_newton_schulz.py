import pytest
import torch

from hp_muon_plugin.config.choices import Schedule
from hp_muon_plugin.muon.coefficients import SCHEDULES, resolve_schedule
from hp_muon_plugin.muon.newton_schulz import newton_schulz
from hp_muon_plugin.muon.reference import reference_newton_schulz

KELLER = resolve_schedule(Schedule.keller)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.custom])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 64), (1, 1, 40), (2, 5, 7)])
def test_equals_the_float64_iteration(schedule: Schedule, shape: tuple[int, int, int]) -> None:
    coefficients = resolve_schedule(schedule)
    batch = gaussian(*shape)
    result = newton_schulz(batch.clone(), coefficients)
    for matrix, got in zip(batch, result, strict=True):
        wanted = reference_newton_schulz(matrix, coefficients)
        # float32 rounding, magnified by the slope of the schedule: at small singular values, and for
        # cans also at 1, the only singular value of a single row, where its slope is about 1e4
        tolerance = 1e-2 if schedule is Schedule.cans and shape[1] == 1 else 5e-4
        assert float((got - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("exponent", [-45, -30, -20, -10, 0, 10, 19, 38])
def test_the_result_does_not_depend_on_the_size_of_the_gradient(exponent: int) -> None:
    """Emerging-Optimizers #229: a gradient of norm 1e-10 came out 25 times too small, 1e-20 as zero."""
    scale = 2.0 ** round(exponent * 3.3219)
    batch = torch.eye(8)[None] * scale
    assert float(batch.max()) > 0
    result = newton_schulz(batch.clone(), KELLER)
    torch.testing.assert_close(result, newton_schulz(torch.eye(8)[None].clone(), KELLER), rtol=1e-6, atol=1e-6)


def test_zero_gives_zero() -> None:
    """Emerging-Optimizers PR 254: 0/0 became NaN."""
    assert torch.equal(newton_schulz(torch.zeros(2, 4, 6), KELLER), torch.zeros(2, 4, 6))


def test_empty_batch_and_empty_rows_give_empty() -> None:
    assert newton_schulz(torch.zeros(0, 4, 6), KELLER).shape == (0, 4, 6)
    assert newton_schulz(torch.zeros(3, 0, 6), KELLER).shape == (3, 0, 6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_entry_stays_in_its_own_matrix(bad: float) -> None:
    """dion #76: one NaN spread through a fused batch."""
    batch = gaussian(3, 6, 10)
    alone = newton_schulz(batch.clone(), KELLER)
    batch[1, 2, 3] = bad
    result = newton_schulz(batch.clone(), KELLER)
    assert not torch.isfinite(result[1]).all()
    assert torch.equal(result[[0, 2]], alone[[0, 2]])


def test_one_row_is_scaled_by_the_scalar_polynomial() -> None:
    row = gaussian(1, 1, 50)
    value = 1.0
    for a, b, c in KELLER:
        value = a * value + b * value**3 + c * value**5
    torch.testing.assert_close(newton_schulz(row.clone(), KELLER), value * row / row.norm(), rtol=1e-5, atol=1e-6)


def test_singular_values_of_the_float32_result_lie_in_the_published_band() -> None:
    """Emerging-Optimizers PR 228: outliers beyond it were seen in bfloat16."""
    values = torch.linalg.svdvals(newton_schulz(gaussian(4, 32, 64), KELLER))
    assert float(values.min()) > 0.68
    assert float(values.max()) < 1.14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_iterates_and_returns_its_own_type(dtype: torch.dtype) -> None:
    batch = gaussian(2, 32, 64)
    result = newton_schulz(batch.to(dtype), KELLER)
    wanted = newton_schulz(batch.clone(), KELLER)
    assert result.dtype == dtype
    assert float((result.float() - wanted).norm() / wanted.norm()) < 0.03


def test_singular_vectors_are_kept() -> None:
    x = gaussian(1, 12, 30)
    u, _, vh = torch.linalg.svd(x[0].double(), full_matrices=False)
    core = u.mT @ newton_schulz(x.clone(), KELLER)[0].double() @ vh.mT
    off_diagonal = core - torch.diag(core.diagonal())
    assert float(off_diagonal.abs().max()) < 1e-4


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_brings_its_smallest_singular_value_to_the_band(schedule: Schedule) -> None:
    value = SCHEDULES[schedule].smallest * 1.05
    for a, b, c in resolve_schedule(schedule):
        value = a * value + b * value**3 + c * value**5
    assert 0.66 < value < 1.21
