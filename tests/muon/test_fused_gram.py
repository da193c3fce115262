"""Matrices that lie in one weight row by row, as q, k and v, over ranks that cut it: each goes its own way."""

import itertools
import random
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from hp_muon_plugin.config.choices import FloatDtype, Strategy
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.cuts import Cuts
from hp_muon_plugin.layout.fused import interleaved_heads_view, qkv_view, stacked_rows_view
from hp_muon_plugin.layout.spec import AxisSplit, MatrixView, ParamSpec, Role
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.distributed.footprint import Footprint
from hp_muon_plugin.muon.distributed.items import ShardedParam, items_of
from hp_muon_plugin.muon.distributed.optimizer import ShardedMuonOptimizer
from hp_muon_plugin.muon.distributed.plan import Route
from hp_muon_plugin.muon.distributed.planner import share_plan
from hp_muon_plugin.muon.distributed.share import Share
from hp_muon_plugin.muon.reference import ReferenceMuon
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.train.setup import Launch

COLS = 24
VIEWS: dict[str, MatrixView] = {
    "qkv": qkv_view(4, 2, 16, COLS),  # q [128, 24], k and v [64, 24]: tall
    "gated_qkv": qkv_view(3, 2, 8, COLS, has_gate=True),
    "one_group": qkv_view(1, 4, 32, COLS),
    "kv": interleaved_heads_view(4, [("k", 12), ("v", 16)], COLS),
    "kv_per_head": interleaved_heads_view(3, [("k", 28), ("v", 40)], COLS, per_head=True),
    "latent": stacked_rows_view([("latent", 50), ("rotary", 26)], COLS),
    "wide_qkv": qkv_view(2, 2, 4, 40),  # q [16, 40], k and v [8, 40]
}


def _specs() -> list[ParamSpec]:
    found = []
    for name, view in VIEWS.items():
        numel, cols = 1, view.factors[-1]
        for size in view.factors:
            numel *= size
        found.append(ParamSpec(name, Role.attention_qkv, (numel // cols, cols), view=view))
    return found


def _params(size: int, seed: int) -> list[ShardedParam]:
    """Cut between rows: as even as that goes with seed 0, else at random places, so that some ranks hold nothing."""
    generator, found = random.Random(seed), []
    for spec in _specs():
        rows, cols = spec.shape
        inner = sorted(generator.choice([0, rows, *[generator.randrange(rows)] * 4]) for _ in range(size - 1))
        inner = inner if seed else [rows * rank // size for rank in range(1, size)]
        found.append(ShardedParam(spec, Cuts.of([0, *(row * cols for row in inner), rows * cols])))
    return found


@given(st.sampled_from(sorted(VIEWS)), st.lists(st.integers(0, 10_000), max_size=7))
def test_items_hold_every_element_of_a_rank_once(name: str, places: list[int]) -> None:
    spec = next(spec for spec in _specs() if spec.name == name)
    rows, cols = spec.shape
    cuts = Cuts.of([0, *sorted(place % (rows + 1) * cols for place in places), rows * cols])
    items = items_of(0, ShardedParam(spec, cuts))
    for rank in range(cuts.size):
        found = []
        for item in items:
            low, high = item.span(rank)
            assert sum(run.numel for run in item.runs(low, high)) == high - low
            for run in item.runs(low, high):
                starts = (item.start + run.start + index * run.step for index in range(run.times))
                found += [start + element for start in starts for element in range(run.length)]
        assert sorted(found) == list(range(cuts[rank], cuts[rank + 1]))
    for item in items:
        assert item.cuts == Cuts.of(list(item.cuts))
        if item.is_cut and name != "kv_per_head":
            assert item.matrix is not None
            assert item.is_cut_between_rows


STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 0.02, "clip_grad": 0.0}


def _wholes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(spec.numel, generator=generator).mul_(0.05) for spec in _specs()]


def _grads(step: int) -> list[torch.Tensor | None]:
    """One weight is left alone in each step."""
    generator = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(spec.numel, generator=generator) for spec in _specs()]
    return [None if place == step % len(found) else grad for place, grad in enumerate(found)]


@lru_cache
def reference() -> tuple[torch.Tensor, ...]:
    """The weights after all steps, by one process in float64."""
    config, found = HpMuon(**OPTIONS), [whole.double() for whole in _wholes()]
    rows = resolve_schedule(config.schedule)
    rules = [
        ReferenceMuon(spec.view, rows, momentum=config.momentum, scale=config.scale, factor=config.scale_factor)  # type: ignore[arg-type]
        for spec in _specs()
    ]
    for step in range(STEPS):
        for place, grad in enumerate(_grads(step)):
            if grad is not None:
                decay = config.weight_decay
                found[place] = rules[place].step(found[place], grad, lr=config.lr, weight_decay=decay)
    return tuple(found)


def _optimizer(
    axis: AxisGroup, seed: int, options: dict[str, Any]
) -> tuple[ShardedMuonOptimizer, list[torch.nn.Parameter], list[slice]]:
    """The optimizer, what this rank holds of each weight, and where."""
    params = _params(axis.size, seed)
    spans = [slice(param.cuts[axis.index], param.cuts[axis.index + 1]) for param in params]
    mains = [torch.nn.Parameter(whole[span].clone()) for whole, span in zip(_wholes(), spans, strict=True)]
    share = Share(axis, tuple(params), tuple(main if main.numel() else None for main in mains))
    specs = {main: param.spec for main, param in zip(mains, params, strict=True)}
    groups = [{"params": [main for main in mains if main.numel()], "algorithm": "muon"}]
    config = HpMuon(**OPTIONS, **options)
    return ShardedMuonOptimizer(groups, specs, config, shares=[share], device=torch.device("cpu")), mains, spans


def _errors(axis: AxisGroup, seed: int, options: dict[str, Any]) -> tuple[set[str], float]:
    """Routes that were taken, and the largest error of this rank's part of a weight, relative to its change."""
    optimizer, mains, spans = _optimizer(axis, seed, options)
    for step in range(STEPS):
        for main, span, grad in zip(mains, spans, _grads(step), strict=True):
            main.grad = None if grad is None or not main.numel() else grad[span].clone()
        optimizer.step()
    error = 0.0
    for main, span, whole, wanted in zip(mains, spans, _wholes(), reference(), strict=True):
        if main.numel():
            difference = (main.detach().double() - wanted[span]).norm()
            error = max(error, float(difference / (wanted[span] - whole[span].double()).norm()))
    (plan,) = optimizer.share_plans
    return {f"{plan.items[i].spec.name} {batch.route}" for batch in plan.batches for i in batch.items}, error


def _buffers(launch: Launch) -> None:
    joined(launch)
    axis = AxisGroup.from_group("flat", dist.group.WORLD)
    for strategy, seed in itertools.product(Strategy, range(2)):
        optimizer, mains, _ = _optimizer(axis, seed, {"strategy": strategy})
        for main in mains:
            main.grad = torch.ones_like(main)
        optimizer.step()
        footprint = Footprint(optimizer.config, "cpu", num_threads=torch.get_num_threads())
        footprint.add_plan(optimizer.share_plans[0], axis.index)
        assert footprint.nbytes == optimizer._workspace.nbytes, (strategy, seed)


def test_predicted_buffers_are_the_real_ones() -> None:
    run_ranks(3, _buffers)


def _all_strategies(launch: Launch) -> dict[str, set[str]]:
    joined(launch)
    axis = AxisGroup.from_group("flat", dist.group.WORLD)
    found: dict[str, set[str]] = {}
    for strategy, seed in itertools.product(Strategy, range(2)):
        routes, error = _errors(axis, seed, {"strategy": strategy})
        # of the change; float32 Gram matrices may cost as much (docs/newton_schulz.md)
        assert error < 5e-5, (strategy, seed, error)
        found.setdefault(str(strategy), set()).update(routes)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy_equals_the_float64_reference(ranks: int) -> None:
    reference()
    (routes, *_) = run_ranks(ranks, _all_strategies)
    tall = {route for route in routes["gram"] if not route.startswith("wide")}
    assert all(route.endswith(f" {Route.GRAM}") for route in tall)
    assert {"qkv[q]", "qkv[k]", "qkv[v]", "kv[k]", "kv[v]"} <= {route.split()[0] for route in tall}
    assert f"wide_qkv[q] {Route.GATHERED_GRAM}" in routes["gram"]


def _half(launch: Launch) -> float:
    joined(launch)
    half = {"momentum_dtype": FloatDtype.bfloat16, "comm_dtype": FloatDtype.bfloat16}
    return _errors(AxisGroup.from_group("flat", dist.group.WORLD), 0, {"strategy": Strategy.gram, **half})[1]


def test_momenta_and_messages_of_half_precision() -> None:
    """Each rank's rows are read through float32 then; bf16 has 8 bits."""
    reference()
    assert max(run_ranks(3, _half)) < 0.1


def test_what_cannot_be_divided_goes_whole() -> None:
    """Parts of rows, and weights that tensor-parallel ranks divide too."""
    spec = _specs()[0]
    rows, cols = spec.shape
    inside_a_row = ShardedParam(spec, Cuts.of([0, 5 * cols + 1, rows * cols]))
    split = ParamSpec("w", spec.role, spec.shape, view=spec.view, split=AxisSplit("tp", 2, spec.shape, 0))
    cut_twice = ShardedParam(split, Cuts.of([0, cols, rows * cols // 2]))
    for param, why in ((inside_a_row, "inside rows"), (cut_twice, "tensor-parallel ranks cut it too")):
        (item,) = items_of(0, param)
        assert item.matrix is None
        plan = share_plan([param], HpMuon(strategy=Strategy.gram), axis="flat", size=2)
        assert [batch.route for batch in plan.batches] == [Route.OWNER]
        assert [choice.refusal for choice in plan.choices if why in choice.refusal]
    whole_on_a_rank = ShardedParam(spec, Cuts.of([0, 0, rows * cols]))
    (item,) = items_of(0, whole_on_a_rank)
    assert item.spec is spec
