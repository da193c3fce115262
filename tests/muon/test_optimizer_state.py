"""What the optimizer keeps between steps, and resuming from it."""

import copy

import pytest
import torch

from hp_muon_plugin.config.choices import FloatDtype
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.muon import build_adamw, build_optimizer
from muon.small_models import model_of, set_grads, single


def test_momentum_only_for_muon_and_two_moments_for_adamw() -> None:
    model = model_of(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24))
    optimizer = build_optimizer(model)
    set_grads(model, 0)
    optimizer.step()
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    assert held == 4 * 16 * 24 + 8 * (24 + 24 + 24)
    assert set(optimizer.state[model[0].weight]) == {"momentum_buffer"}
    assert optimizer.plan.state_bytes() == 4 * 16 * 24


@pytest.mark.parametrize(("dtype", "size"), [(FloatDtype.float32, 4), (FloatDtype.bfloat16, 2)])
def test_momentum_is_stored_in_the_configured_type(dtype: FloatDtype, size: int) -> None:
    param, optimizer = single((8, 6), momentum_dtype=dtype)
    param.grad = torch.randn(8, 6)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert buffer.element_size() == size
    assert optimizer.plan.state_bytes(size) == size * 48


def test_changing_the_momentum_convention_on_load() -> None:
    """Peers store the sum m = mu m + g; one step with g=1 stores 1.0 there and 0.05 here."""
    param, optimizer = single((4, 4))
    param.grad = torch.ones(4, 4)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 0.05))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"].fill_(1.0)
    saved["param_groups"][0]["momentum_convention"] = "sum"
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 0.05))
    assert optimizer.state_dict()["param_groups"][0]["momentum_convention"] == "moving_average"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact_whatever_type_the_state_was_saved_in(dtype: torch.dtype) -> None:
    """DeepSpeed #7746: bf16 weights with float32 momentum could not be resumed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)).to(dtype)
    straight = build_optimizer(model)
    for step in range(3):
        set_grads(model, step)
        straight.step()
    resumed = copy.deepcopy(model)
    other = build_optimizer(resumed)
    other.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert other.state[resumed[0].weight]["momentum_buffer"].dtype == torch.float32
    for step in range(3, 6):
        set_grads(model, step)
        set_grads(resumed, step)
        straight.step()
        other.step()
    for left, right in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_live_options_win_over_loaded_ones() -> None:
    """VeOmni: a saved head split overwrote the configured one on resume."""
    param, optimizer = single((8, 8), lr=0.1, momentum=0.8)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"algorithm": "adamw", "momentum": 0.95}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["algorithm"] == "muon"
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_a_sum_is_converted_by_the_decay_that_it_was_made_with() -> None:
    param, optimizer = single((4, 4), momentum=0.5)
    param.grad = torch.ones(4, 4)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"].fill_(1.0)
    saved["param_groups"][0] |= {"momentum_convention": "sum", "momentum": 0.9}
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 0.1))


@pytest.mark.parametrize("key", ["momentum_buffer", "exp_avg"])
def test_a_state_of_other_shapes_is_refused_whole(key: str) -> None:
    """torch takes it, and the next step ends with "the size of tensor a must match the size of tensor b"."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))
    optimizer = build_optimizer(model)
    set_grads(model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    numbers = [number for number, state in saved["state"].items() if key in state]
    saved["state"][numbers[-1]][key] = torch.zeros(3, 5)
    before = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ConfigError, match=rf"{key}: has shape \(3, 5\), and the parameter \(.*nothing was loaded"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][number][name], value)


def test_a_state_of_another_optimizer_is_refused_whole() -> None:
    """AdamW's has as many groups here: Muon began without momentum, with AdamW's learning rate and decay."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))
    saving, loading = build_adamw(model, lr=7.0), build_optimizer(model)
    set_grads(model, 0)
    saving.step()
    before = copy.deepcopy(loading.state_dict())
    why = r"0\.weight: step, exp_avg, exp_avg_sq: has no momentum_buffer, which muon needs"
    with pytest.raises(ConfigError, match=why):
        loading.load_state_dict(saving.state_dict())
    assert loading.state_dict() == before


def test_parameters_without_a_saved_state_begin_anew() -> None:
    """As those that had no gradient before the state was saved."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8))
    saving, loading = build_optimizer(model), build_optimizer(model)
    set_grads(model, 0)
    model[0].weight.grad = None
    saving.step()
    loading.load_state_dict(saving.state_dict())
    assert "momentum_buffer" not in loading.state[model[0].weight]
    assert "exp_avg" in loading.state[model[0].bias]
