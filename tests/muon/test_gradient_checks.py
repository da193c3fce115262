"""Zero, missing, bad and huge gradients: each has a defined result."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_muon_plugin.config.choices import MissingGrad, NonFinite
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.muon import build_adamw, build_optimizer
from muon.small_models import model_of, set_grads, single


def test_zero_gradient_decays_and_nothing_else() -> None:
    param, optimizer = single((5, 7), lr=0.1, weight_decay=0.0)
    before = param.detach().clone()
    param.grad = torch.zeros(5, 7)
    optimizer.step()
    assert torch.equal(param.detach(), before)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.zeros(5, 7))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """KellerJordan #54: a weight that took no part in the step was decayed, 0.99 instead of 1."""
    param, optimizer = single((4, 4), lr=0.1, weight_decay=0.1)
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param.detach(), before)
    assert not optimizer.state[param]


def test_missing_gradient_is_an_error_if_asked_for() -> None:
    param, optimizer = single((4, 4), missing_grad=MissingGrad.error)
    with pytest.raises(GradientError, match="w: no gradient"):
        optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_skips_the_step_and_leaves_no_trace(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed #8432: an overflow poisoned the momentum; the next good step must be as if it never was."""
    model, clean = model_of(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)), None
    clean = copy.deepcopy(model)
    optimizer, expected = build_optimizer(model), build_optimizer(clean)
    for step in range(3):
        set_grads(model, step)
        set_grads(clean, step)
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            weights = [p.detach().clone() for p in model.parameters()]
            model[0].weight.grad[2, 3] = bad
            optimizer.step()
            assert optimizer.skipped_steps == 1
            assert "NaN or infinite gradient in 0.weight" in caplog.text
            for kept, param in zip(weights, model.parameters(), strict=True):
                assert torch.equal(kept, param.detach())
            same_state(state, optimizer.state_dict())
            continue
        optimizer.step()
        expected.step()
    for left, right in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(left, right)


def same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["state"].keys() == right["state"].keys()
    for key, entry in left["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, right["state"][key][name]), (key, name)


def test_a_bad_gradient_raises_and_names_the_parameter_if_asked_for() -> None:
    """dion #76, validate: the error names the matrix, and nothing was changed."""
    model = model_of(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    optimizer = build_optimizer(model, non_finite="error")
    set_grads(model, 0)
    model[1].weight.grad[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(GradientError, match=r"^1\.weight: gradient is NaN"):
        optimizer.step()
    assert all(torch.equal(kept, p) for kept, p in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_a_huge_but_finite_gradient_is_no_error() -> None:
    """torch.optim.Muon 2.13 returns a silent zero update once the sum of squares overflows float32."""
    param, optimizer = single((8, 8), lr=0.1, weight_decay=0.0)
    param.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * 1e25
    before = param.detach().clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert 0.1 < float((param.detach() - before).norm()) < 0.1 * 0.2 * 8 * 1.2


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_momentum_nor_gradient_is_normalised_in_place(nesterov: bool, dtype: torch.dtype) -> None:
    """pytorch PR 194664: with nesterov=False in bf16 the buffer came back as 0.1582 instead of 0.1."""
    param, optimizer = single(
        (4, 4), dtype=dtype, lr=1e-9, weight_decay=0.0, momentum=0.9, nesterov=nesterov, momentum_dtype="bfloat16"
    )
    param.grad = torch.ones(4, 4, dtype=dtype)
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 0.1, dtype=torch.bfloat16), rtol=0, atol=0
    )
    assert torch.equal(param.grad, torch.ones(4, 4, dtype=dtype))


def test_non_finite_choice_is_typed() -> None:
    assert HpMuon().non_finite is NonFinite.skip


@pytest.mark.parametrize("build", [build_optimizer, build_adamw])
def test_an_unfrozen_parameter_is_an_error_and_no_silence(build: Callable[..., Any]) -> None:
    """It was in no group, so it kept its first value however long it was trained."""
    model = model_of(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    optimizer = build(model)
    set_grads(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    model[1].weight.requires_grad_(True)
    with pytest.raises(GradientError, match=r"^1\.weight: requires a gradient now, but was frozen"):
        optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    model[1].weight.requires_grad_(False)
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)
