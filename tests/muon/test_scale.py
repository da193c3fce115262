import math

import pytest
import torch

from hp_muon_plugin.config.choices import ScaleMode
from hp_muon_plugin.muon import build_optimizer
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


def test_rms_of_a_match_rms_update_is_that_of_adamw() -> None:
    """verl: with another scale AdamW's learning rate was 4.4 times too large for Muon."""
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = build_optimizer(layer, lr=1.0, weight_decay=0.0, nesterov=False)
    layer.weight.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    before = layer.weight.detach().clone()
    optimizer.step()
    rms = float((layer.weight.detach() - before).square().mean().sqrt())
    assert rms == pytest.approx(0.165, abs=0.012)
