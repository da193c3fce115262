"""Hooks of shards, as fully_shard of PyTorch runs them; hooks that nobody would run are refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.fsdp.roots import no_sync
from hp_muon_plugin.fsdp.whole import full_state_dict
from hp_muon_plugin.train.setup import Launch
from tests.dist_pool import joined, run_ranks
from tests.fsdp.small_models import WIDTH, Block, Language, loss, tokens


def _model() -> Language:
    torch.manual_seed(1)
    model = Language([Block(WIDTH) for _ in range(2)], is_tied=False)
    model.layers[0].unused = nn.Parameter(torch.ones(4, 3))
    return model


def _sharded(launch: Launch, outer: str = "replicate") -> nn.Module:
    replicas = (2,) if launch.world_size == 4 else ()
    mesh = init_device_mesh("cpu", (*replicas, launch.world_size // 2 if replicas else launch.world_size))
    model = _model()
    for layer in model.layers:
        hp_fully_shard(layer, mesh)
    return hp_fully_shard(model, mesh, outer=outer)


def _watched(model: nn.Module) -> list[tuple[str, float]]:
    """What hooks of all parameters see, a sum of the gradient each."""
    seen: list[tuple[str, float]] = []

    def note(name: str, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        seen.append((name, float(grad.sum() if not hasattr(grad, "full_tensor") else grad.full_tensor().sum())))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
    return seen


def _steps(model: nn.Module, launch: Launch) -> None:
    """Two steps of two micro-batches each; the first of them is not reduced."""
    for step in range(2):
        model.zero_grad()
        if isinstance(model, nn.Module) and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            loss(model, tokens(step, 0, launch.rank)).backward()
            model.set_requires_gradient_sync(True)
        else:
            with no_sync(model):
                loss(model, tokens(step, 0, launch.rank)).backward()
        loss(model, tokens(step, 1, launch.rank)).backward()


def _as_fully_shard(launch: Launch) -> tuple[list[str], float]:
    joined(launch)
    ours, theirs = _sharded(launch), _model()
    for layer in theirs.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (launch.world_size,)))
    fully_shard(theirs, mesh=init_device_mesh("cpu", (launch.world_size,)))
    seen, expected = _watched(ours), _watched(theirs)
    _steps(ours, launch)
    _steps(theirs, launch)
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in expected)
    every: list[Any] = [None] * launch.world_size
    torch.distributed.all_gather_object(every, seen)
    sums = {name: 0.0 for name, _ in seen}
    for told in every:  # our shards are plain: their sums add up over ranks
        for name, value in told:
            sums[name] += value
    for name, value in expected:
        sums[name] -= value
    return sorted({name for name, _ in seen}), max(map(abs, sums.values()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hooks_of_shards_run_once_a_step_with_the_reduced_gradient(world_size: int) -> None:
    """They were never run: an optimizer that steps in them trained nothing."""
    for names, gap in run_ranks(world_size, _as_fully_shard):
        assert names == sorted(name for name, _ in _model().named_parameters() if "unused" not in name)
        assert gap < 1e-5


def _optimizer_in_hooks(launch: Launch, outer: str) -> float:
    """The usual pattern: each parameter has an optimizer, which steps and clears its gradient once that is there."""
    joined(launch)
    model, whole = _sharded(launch, outer), _model()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    alone = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        loss(model, tokens(step, 0, launch.rank)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        for rank in range(launch.world_size):
            (loss(whole, tokens(step, 0, rank)) / launch.world_size).backward()
        alone.step()
        alone.zero_grad()
    weights = full_state_dict(model)
    return max(float((weights[name] - value).detach().abs().max()) for name, value in whole.named_parameters())


@pytest.mark.parametrize(
    ("world_size", "outer"), [(1, "replicate"), (2, "replicate"), (4, "replicate"), (4, "broadcast"), (4, "shard")]
)
def test_an_optimizer_that_steps_in_hooks_trains_as_one_process(world_size: int, outer: str) -> None:
    assert max(run_ranks(world_size, _optimizer_in_hooks, outer)) < 1e-4


def _refused(launch: Launch) -> list[str]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    told = []
    for kind in ("register_post_accumulate_grad_hook", "register_hook"):
        model = _model()
        handle = getattr(model.layers[0].first.weight, kind)(lambda value: None)
        with pytest.raises(ConfigError) as caught:
            hp_fully_shard(model.layers[0], mesh)
        told.append(str(caught.value))
        handle.remove()
        hp_fully_shard(model.layers[0], mesh)
    hp_fully_shard(model, mesh)
    handle = model.layers[0].first.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(ConfigError) as caught:
        loss(model, tokens(0, 0, 0))
    told.append(str(caught.value))
    handle.remove()
    loss(model, tokens(0, 0, 0)).backward()
    return told


def test_hooks_that_nobody_would_run_are_refused() -> None:
    """fully_shard of PyTorch drops them without a word."""
    ((early, early_too, late),) = run_ranks(1, _refused)
    assert early == early_too
    assert early.startswith("module=first.weight: has a gradient hook, which would never run")
    assert late.startswith("module=layers.0.first.weight: has a hook by register_hook, which would never run")
