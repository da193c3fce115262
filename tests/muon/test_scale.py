import math

import pytest
import torch

from hp_muon_plugin.config.choices import ScaleMode, Schedule
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.reference import reference_newton_schulz
from hp_muon_plugin.muon.scale import update_scale


@pytest.mark.parametrize(
    ("mode", "rows", "cols", "wanted"),
    [
        (ScaleMode.match_rms_adamw, 6, 4, 0.2 * math.sqrt(6)),
        (ScaleMode.spectral, 6, 4, math.sqrt(6)),
        (ScaleMode.shape_scaling, 16, 4, 2.0),
        (ScaleMode.shape_scaling, 4, 16, 1.0),
        (ScaleMode.unit_rms, 4, 16, 0.5),
        (ScaleMode.none, 4, 16, 1.0),
    ],
)
def test_formula(mode: ScaleMode, rows: int, cols: int, wanted: float) -> None:
    assert update_scale(mode, rows, cols) == pytest.approx(wanted)
    assert update_scale(mode, rows, cols, factor=3.0) == pytest.approx(3 * wanted)


def test_padding_does_not_change_the_scale() -> None:
    """Megatron PR 6683: rows padded from 6 to 8 raised the learning rate by 15 percent."""
    assert update_scale(ScaleMode.match_rms_adamw, 6, 4) == pytest.approx(0.4899, abs=1e-4)


def test_a_weight_that_is_padded_beside_larger_ones_has_the_scale_of_its_own_shape() -> None:
    """The same through the optimizer: 6 rows beside 8 and 16, short sides padded or not."""
    weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(s)) for s in [(6, 4), (8, 5), (16, 16)]])
    optimizer = build_optimizer(weights, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, clip_grad=0.0)
    for number, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    wanted = 0.2 * math.sqrt(6) * reference_newton_schulz(weights[0].grad, resolve_schedule(Schedule.keller))
    optimizer.step()
    torch.testing.assert_close(weights[0].detach().double(), -wanted, rtol=1e-4, atol=1e-5)


def test_rms_of_a_match_rms_update_is_that_of_adamw() -> None:
    """verl: with another scale AdamW's learning rate was 4.4 times too large for Muon."""
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = build_optimizer(layer, lr=1.0, weight_decay=0.0, nesterov=False)
    layer.weight.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    before = layer.weight.detach().clone()
    optimizer.step()
    rms = float((layer.weight.detach() - before).square().mean().sqrt())
    assert rms == pytest.approx(0.165, abs=0.012)
