"""Bit for bit what one process computes, where the arithmetic is the same, and whatever lies in reused buffers."""

from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.config.choices import Strategy
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed import planner as planning
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.distributed.whole import WholeBatch
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import (
    Shapes,
    assert_close,
    built,
    filled,
    give_grads,
    model_of_weights,
    sharded,
    trained,
    whole_weights,
)

SHAPES: Shapes = {
    "wide": (24, 80),
    "wide_too": (24, 80),
    "tall": (72, 20),
    "square": (32, 32),
    "short": (2, 40),
    "column": (33, 1),
    "experts": (5, 8, 20),
}
# Momentum 1/2, rates that are powers of two, and a weight that decays to 0 in each step: all is exact but
# Newton-Schulz. With another decay, one process may add the update in the last product, which rounds otherwise.
EXACT: dict[str, Any] = {
    "momentum": 0.5,
    "lr": 2**-6,
    "weight_decay": 2.0**6,
    "scale": "none",
    "clip_grad": 0.0,
    "adamw": {"lr": 1e-3},
}


def _integers(seed: int) -> dict[str, torch.Tensor]:
    return {name: (8 * value).round() for name, value in filled(seed, SHAPES).items()}


def _updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Weights after each step, which are the step's update."""
    found = []
    for seed in (1, 2, 3):
        give_grads(model, _integers(seed))
        optimizer.step()
        found.append(whole_weights(model))
    return found


def _run_exact(launch: Launch, layout: str) -> list[str]:
    planning._ROUTES[Strategy.allgather_dedup] = (Route.UPDATES,)  # send updates also where factors were cheaper
    whole = {}
    for nesterov in (True, False):
        model = model_of_weights(SHAPES)
        whole[nesterov] = _updates(model, build_optimizer(model, **EXACT, nesterov=nesterov))
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    differing = []
    for strategy in ("allgather", "allgather_dedup", "alltoall"):
        for nesterov in (True, False):
            model = sharded(SHAPES, layout, mesh)
            given = {"max_batch_bytes": 8192}
            optimizer = built(model, given=given, **EXACT, nesterov=nesterov, strategy=strategy)
            for step, (found, expected) in enumerate(zip(_updates(model, optimizer), whole[nesterov], strict=True)):
                differing += [
                    f"{strategy} {nesterov} {step} {name}"
                    for name, value in expected.items()
                    if not torch.equal(found[name], value)
                ]
    return differing


@pytest.mark.parametrize(("ranks", "layout"), [(1, "flat"), (2, "flat"), (3, "per_param"), (4, "fully_shard")])
def test_equal_input_of_newton_schulz_gives_equal_bits(ranks: int, layout: str) -> None:
    """A matrix does not depend on those that are orthogonalised with it."""
    assert run_ranks(ranks, _run_exact, layout) == [[]] * ranks


def _run_poisoned(launch: Launch) -> bool:
    gradients = [filled(1, SHAPES), filled(2, SHAPES)]
    reference = model_of_weights(SHAPES)
    expected = trained(reference, build_optimizer(reference), gradients)
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    for strategy in ("auto", "allgather", "allgather_dedup", "alltoall", "gram"):
        model = sharded(SHAPES, "per_param", mesh)
        optimizer = built(model, given={"max_batch_bytes": 8192}, strategy=strategy)
        for _, executor in optimizer._shares:
            for batch in executor._batches:
                if isinstance(batch, WholeBatch):
                    batch._executor._is_fused_by_lists = True  # as on accelerators
        trained(model, optimizer, gradients[:1])
        for buffer in optimizer._workspace._buffers.values():
            buffer.fill_(torch.nan)
        assert_close(trained(model, optimizer, gradients[1:]), expected, strategy)
    return True


def test_what_lies_in_buffers_does_not_matter() -> None:
    """On accelerators a fresh buffer may hold NaN, and NaN times a decay of 0 is NaN."""
    assert run_ranks(2, _run_poisoned) == [True] * 2
