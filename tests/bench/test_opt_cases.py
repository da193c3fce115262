"""Cases of ``hp-muon bench optimizer``, and the reference that results are compared with."""

import pytest
import torch

from hp_muon_plugin.bench.opt_cases import NAMED, Weight, least_bytes, parse_case
from hp_muon_plugin.bench.opt_convention import Convention, Decay, Reference
from hp_muon_plugin.bench.opt_ours import CONVENTION
from hp_muon_plugin.config.choices import ScaleMode
from hp_muon_plugin.errors import ConfigError


def test_scaled_decay_is_another_step() -> None:
    reference = Reference(parse_case("8x4", "x"))
    name = "layers.0.matrix_0"
    plain, scaled = (
        reference.changes(Convention(ScaleMode.shape_scaling, decay=decay), "float64")[name] for decay in Decay
    )
    assert float((plain - scaled).abs().max()) > 1e-4


def test_a_nan_or_a_missing_element_is_wrong() -> None:
    case = parse_case("4x6", "x")
    reference, (weight,) = Reference(case), case.weights
    whole = torch.full((weight.numel,), float("nan"))
    assert reference.judge(CONVENTION, [{weight.full_name: [(0, whole)]}]).error == 1.0
    assert reference.judge(CONVENTION, [{weight.full_name: [(0, torch.zeros(5))]}]).error == 1.0
    assert not reference.judge(CONVENTION, [{}]).is_right


def test_the_505b_model_is_divided() -> None:
    shapes = {weight.name: weight.shape for weight in parse_case("505b", "x").weights}
    assert shapes["kv_down"] == (72, 640)
    assert shapes["experts_down"] == (16, 640, 224)
    assert shapes["mlp_gate"] == (2304, 640)


def test_bytes_of_the_floor() -> None:
    assert least_bytes(Weight(0, "experts", (8, 4, 6)), 4) == 0.0
    assert least_bytes(Weight(0, "wide", (8, 32)), 4) == 4 * 2 * 8 * 32 * 3 / 16  # rows to an owner, and back
    assert least_bytes(Weight(0, "tall", (64, 4)), 4) == 4 * 2 * 4 * 4 * 3 / 4  # the Gram matrix, all-reduced


@pytest.mark.parametrize("text", [*NAMED, "1dense+1moe4/64", "74x24x10240", "[4,8,6]+2x3x4"])
def test_cases_are_read(text: str) -> None:
    assert parse_case(text, "x").weights


@pytest.mark.parametrize("text", ["0dense", "1moe0", "1dense/3", "1dense/128", "what", "", "1dense+"])
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no case"):
        parse_case(text, "x")
