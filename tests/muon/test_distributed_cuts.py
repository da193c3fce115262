"""Flat shards that end anywhere, also inside rows, as those of Megatron's DistributedOptimizer do."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks

from hp_muon_plugin.config.choices import Strategy
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.fused import gated_view, qkv_view
from hp_muon_plugin.layout.spec import MatrixView, ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon.distributed.executor import ShareExecutor
from hp_muon_plugin.muon.distributed.items import ShardedParam
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.distributed.planner import share_plan
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch

CPU = torch.device("cpu")
VIEWS: dict[str, MatrixView] = {
    "wide": plain_matrix(12, 40),
    "tall": plain_matrix(40, 12),
    "qkv": qkv_view(2, 2, 4, 20),
    "per_head": qkv_view(2, 2, 4, 20, per_head=True),
    "gated": gated_view(10, 24),
    "experts": stacked_matrices(5, 6, 8),
}


def _specs() -> list[ParamSpec]:
    found = []
    for name, view in VIEWS.items():
        shape = (view.factors[0], *view.factors[1:]) if len(view.factors) < 4 else (32, 20)
        found.append(ParamSpec(name, Role.matrix, shape, view=view))
    return found


def _cuts(numel: int, size: int, seed: int) -> tuple[int, ...]:
    """Random places, some of them equal: ranks that hold nothing."""
    generator = random.Random(seed)
    inner = sorted(generator.choice([0, numel, generator.randrange(numel)]) for _ in range(size - 1))
    return (0, *inner, numel)


def _steps(specs: list[ParamSpec], spans: list[tuple[int, int]]) -> list[ParamStep | None]:
    """Equal on all ranks, but for the stretch."""
    generator = torch.Generator().manual_seed(3)
    found: list[ParamStep | None] = []
    for spec, (low, high) in zip(specs, spans, strict=True):
        weight, grad, momentum = torch.randn(3, spec.numel, generator=generator).unbind()
        if spec.name == "gated":  # left alone in this step, on all ranks
            found.append(None)
        else:
            found.append(ParamStep(weight[low:high].clone(), grad[low:high], momentum[low:high], 0.9, 0.1, 0.75))
    return found


def run_cuts(launch: Launch) -> set[Route]:
    joined(launch)
    size, rank = launch.world_size, launch.rank
    axis, specs, used = AxisGroup.from_group("flat", dist.group.WORLD), _specs(), set()
    for strategy, seed in itertools.product(Strategy, range(3)):
        config = HpMuon(strategy=strategy)
        expected = _steps(specs, [(0, spec.numel) for spec in specs])
        Executor(build_plan(specs, config), {}, nesterov=True, device=CPU).run(expected)
        params = [ShardedParam(spec, _cuts(spec.numel, size, 100 * seed + place)) for place, spec in enumerate(specs)]
        for max_bytes in (1, 1 << 20):  # a batch for every few items, and one for all
            plan = share_plan(params, config, axis="flat", size=size, max_batch_bytes=max_bytes)
            used |= {batch.route for batch in plan.batches}
            steps = _steps(specs, [(param.cuts[rank], param.cuts[rank + 1]) for param in params])
            executor = ShareExecutor(plan, axis, {}, wire=C10dWire(), config=config, workspace=Workspace(CPU))
            executor.run(dict(enumerate(steps)))
            for param, step, whole in zip(params, steps, expected, strict=True):
                if step is not None and whole is not None:
                    stretch = whole.weight.view(-1)[param.cuts[rank] : param.cuts[rank + 1]]
                    error = (step.weight - stretch).abs().max() if stretch.numel() else 0.0
                    assert error < 1e-5, (strategy, seed, param.spec.name, float(error))
    return used


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_that_end_anywhere(ranks: int) -> None:
    used = set().union(*run_ranks(ranks, run_cuts))
    assert {Route.EVERYWHERE, Route.UPDATES, Route.OWNER} <= used
