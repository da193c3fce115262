"""What people do with torch's optimizers, done with ours."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_muon_plugin.errors import ConfigError, GradientError
from hp_muon_plugin.muon import build_optimizer

INPUTS = torch.linspace(-1, 1, 24).view(4, 6)


def _pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)).to(dtype)
    return model, build_optimizer(model, lr=0.01)


def _train(model: nn.Module, optimizer: Any, step: Callable[[], Any] | None = None) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS.to(next(model.parameters()).dtype)).pow(2).mean().backward()
        (step or optimizer.step)()


def _assert_same(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), its.float(), rtol=0, atol=tolerance)


def test_a_compiled_step_updates_what_a_plain_one_does() -> None:
    """Traced, AdamW's half of the step updated nothing."""
    (model, optimizer), (other, plain) = _pair(), _pair()
    _train(model, optimizer, torch.compile(optimizer.step, backend="eager"))
    _train(other, plain)
    _assert_same(model, other)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_alike_and_on_its_own(make: Callable[[Any], Any]) -> None:
    """A copy had neither options nor specs, and its first step was an AttributeError."""
    model, optimizer = _pair()
    _train(model, optimizer)
    other, copied = make((model, optimizer))
    before = [parameter.clone() for parameter in model.parameters()]
    _train(other, copied)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was)
    _train(model, optimizer)
    _assert_same(model, other)


def test_a_group_that_comes_late_is_refused() -> None:
    """It was taken, and the next step ended in a KeyError that printed a whole tensor."""
    model, optimizer = _pair()
    with pytest.raises(ConfigError, match="without a route"):
        optimizer.add_param_group({"params": nn.Linear(6, 6).parameters()})
    _train(model, optimizer)


def test_float64_trains_as_float32_does() -> None:
    """The norm of gradients refused to narrow its input."""
    (model, optimizer), (other, single) = _pair(torch.float64), _pair()
    _train(model, optimizer)
    _train(other, single)
    _assert_same(model, other, 1e-5)


def test_sparse_and_complex_gradients_are_refused_by_name() -> None:
    """torch's operators answered for them, at length and without a name."""
    sparse = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 6))
    twisted = nn.ParameterDict({"real": torch.ones(4, 4), "twisted": torch.ones(4, 4, dtype=torch.complex64)})
    losses = (sparse(torch.tensor([1])).sum(), twisted["real"].sum() + twisted["twisted"].abs().sum())
    for model, loss, words in zip((sparse, twisted), losses, ("0.weight: a sparse", "twisted: a complex"), strict=True):
        optimizer = build_optimizer(model, lr=0.01)
        loss.backward()
        with pytest.raises(GradientError, match=words):
            optimizer.step()
