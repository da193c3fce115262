"""What strategies send is what the plan says, within HCCL's rules, and what the formulas of the docs give."""

from collections import Counter
from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from hp_muon_plugin.config.choices import Strategy
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.items import ShardedParam, dim0_cuts
from hp_muon_plugin.muon.distributed.messages import Messages, received_bytes, traffic
from hp_muon_plugin.muon.distributed.plan import Route, SharePlan
from hp_muon_plugin.muon.distributed.planner import share_plan
from hp_muon_plugin.muon.rates import Rates
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.strict import StrictWire
from hp_muon_plugin.platform.wire import C10dWire
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import Shapes, assert_close, built, filled, model_of_weights, sharded, trained

SHAPES: Shapes = {
    "wide": (24, 80),
    "wide_too": (24, 80),
    "tall": (72, 20),
    "square": (32, 32),
    "short": (2, 40),
    "column": (33, 1),
    "huge": (96, 64),
    "experts": (6, 8, 20),
    "bias": (7,),
}
GRADIENTS = [filled(1, SHAPES), filled(2, SHAPES)]
# Rates at which one thing costs so much that the others do not count.
ONLY_BYTES = Rates(1e30, 1.0, 0.0)
ONLY_FLOPS = Rates(1.0, 1e30, 0.0)
ONLY_MESSAGES = Rates(1e30, 1e30, 1.0)
Case = tuple[str, str, Rates | None, int]
CASES: list[Case] = [  # layout, strategy, rates, bytes of a batch
    ("flat", "allgather", None, 1 << 26),
    ("per_param", "allgather_dedup", ONLY_FLOPS, 1),
    ("fully_shard", "allgather_dedup", ONLY_BYTES, 1 << 26),
    ("flat", "alltoall", None, 1),
    ("per_param", "gram", None, 4096),
    ("flat", "gram", ONLY_FLOPS, 1 << 26),
    ("per_param", "auto", ONLY_BYTES, 4096),
    ("per_param", "auto", ONLY_FLOPS, 1),
    ("flat", "auto", ONLY_MESSAGES, 1),
]


def _run_cases(launch: Launch, cases: list[Case], is_strict: bool) -> tuple[set[str], set[str]]:
    joined(launch)
    reference = model_of_weights(SHAPES)
    expected = trained(reference, build_optimizer(reference), GRADIENTS)
    mesh = init_device_mesh("cpu", (launch.world_size,), mesh_dim_names=("shard",))
    routes, collectives = set(), set()
    for layout, strategy, rates, batch_bytes in cases:
        strict = StrictWire(C10dWire())
        wire = CountingWire(strict if is_strict else C10dWire())
        model = sharded(SHAPES, layout, mesh)
        given = {"wire": wire, "rates": rates, "max_batch_bytes": batch_bytes}
        optimizer = built(model, given=given, strategy=strategy)
        found = trained(model, optimizer, GRADIENTS)
        what = (layout, strategy, batch_bytes)
        assert_close(found, expected, what)
        if is_strict:
            strict.verify()
        (plan,) = optimizer.share_plans
        routes |= {str(batch.route) for batch in plan.batches}
        counted = {str(kind): (t.num_collectives, t.num_bytes) for (kind, _), t in wire.counts().items()}
        planned = {name: (2 * number, 2 * size) for name, (number, size) in traffic(plan, launch.rank).items()}
        assert counted == planned, what
        collectives |= set(counted)
        _check_received(plan, launch.rank, counted)
        if batch_bytes == 1:
            assert len(plan.batches) > (2 if plan.size == 2 else 1), what  # with two ranks, more than are under way
    return routes, collectives


def _check_received(plan: SharePlan, rank: int, counted: dict[str, tuple[int, int]]) -> None:
    """Of an all-to-all, the bytes that arrive are those of what a rank owns and of its own parts of the rest."""
    size, expected = plan.size, 0
    for name, (_, num_bytes) in counted.items():
        if name not in ("all_to_all", "broadcast"):
            expected += num_bytes // 2 * (size - 1) // size
    for batch in plan.batches:
        messages = Messages(plan, batch)
        for index, owner in zip(batch.items, batch.owners, strict=True):
            item = plan.items[index]
            if batch.route is Route.OWNER:
                expected += 4 * (item.numel - item.held(rank) if owner == rank else item.held(rank))
            elif batch.route is Route.UPDATES and messages.is_broadcast and owner != rank:
                expected += 4 * item.numel
    assert received_bytes(plan, rank) == expected


@pytest.mark.parametrize(("ranks", "is_strict"), [(2, True), (4, True), (3, False)])
def test_every_route_sends_what_the_plan_says_within_the_rules_of_hccl(ranks: int, is_strict: bool) -> None:
    answers = run_ranks(ranks, _run_cases, CASES, is_strict)
    for routes, collectives in answers:
        assert routes == set(map(str, Route))
        assert collectives >= {"all_gather", "reduce_scatter", "all_to_all", "broadcast"}


def _run_experts(launch: Launch) -> dict[Any, Any]:
    joined(launch)
    mesh = init_device_mesh("cpu", (launch.world_size,))
    wire = CountingWire(C10dWire())
    shapes: Shapes = {"a": (4, 8, 20), "b": (8, 6, 6), "c": (2, 5, 9)}
    gradients = [filled(1, shapes)]
    reference = model_of_weights(shapes)
    expected = trained(reference, build_optimizer(reference), gradients)
    for layout in ("per_param", "flat", "fully_shard"):
        model = sharded(shapes, layout, mesh)
        optimizer = built(model, given={"wire": wire}, strategy="gram")
        assert_close(trained(model, optimizer, gradients), expected, layout)
    return wire.counts()


def test_experts_are_not_sent() -> None:
    assert run_ranks(2, _run_experts) == [{}] * 2


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_bytes_received_are_those_of_the_formulas(shape: tuple[int, int]) -> None:
    """The table of muon/distributed/cost.py, with k matrices divided evenly over W ranks."""
    size, count, whole, small = 4, 8, 16 * 48 * 4, 16 * 16 * 4
    spec = [ParamSpec(f"w{i}", Role.matrix, shape, view=plain_matrix(*shape)) for i in range(count)]
    params = [ShardedParam(one, dim0_cuts(shape, size)) for one in spec]
    largest = 4 * count * (size - 1)  # of Gram routes: the largest entry of each part
    by_route = {
        Route.EVERYWHERE: count * whole * (size - 1) // size,
        Route.UPDATES: 2 * count * whole * (size - 1) // size,
        Route.FACTORS: count * (whole + small) * (size - 1) // size,
        Route.OWNER: 2 * count * whole * (size - 1) // size**2,
        Route.GRAM: 2 * count * small * (size - 1) // size + largest,
        Route.GATHERED_GRAM: count * (whole + 2 * small) * (size - 1) // size + largest,
    }
    seen = Counter()
    for strategy in Strategy:
        for rates in (ONLY_BYTES, ONLY_FLOPS, ONLY_MESSAGES):
            plan = share_plan(params, HpMuon(strategy=strategy), axis="shard", size=size, rates=rates)
            (batch,) = plan.batches
            seen[batch.route] += 1
            assert {received_bytes(plan, rank) for rank in range(size)} == {by_route[batch.route]}, batch.route
    assert seen[Route.GRAM if shape[0] > shape[1] else Route.GATHERED_GRAM]


def test_the_number_of_iterations_does_not_grow_with_that_of_matrices() -> None:
    """74 matrices of [24, 10240] and the like are iterated together, whatever the route."""
    from hp_muon_plugin.muon.distributed.executor import ShareExecutor
    from hp_muon_plugin.muon.newton_schulz import NewtonSchulz
    from hp_muon_plugin.muon.workspace import Workspace
    from hp_muon_plugin.platform.collectives import AxisGroup

    calls = Counter()
    original = NewtonSchulz.__call__, NewtonSchulz.factor

    def run(self: Any, stacks: Any) -> None:
        calls["run"] += any(stack.x.numel() for stack in stacks)
        return original[0](self, stacks)

    def factor(self: Any, gram: torch.Tensor, steps: Any, **options: Any) -> torch.Tensor:
        calls["run"] += 1
        return original[1](self, gram, steps, **options)

    NewtonSchulz.__call__, NewtonSchulz.factor = run, factor  # type: ignore[method-assign]
    try:
        for strategy in ("allgather", "allgather_dedup", "alltoall", "gram"):
            counts = []
            for number in (4, 74):
                shape = (8, 96)
                specs = [ParamSpec(f"w{i}", Role.matrix, shape, view=plain_matrix(*shape)) for i in range(number)]
                params = [ShardedParam(one, dim0_cuts(shape, 2)) for one in specs]
                config = HpMuon(strategy=Strategy(strategy))
                plan = share_plan(params, config, axis="shard", size=2)
                axis = AxisGroup("shard", 2, 0, None)
                executor = ShareExecutor(
                    plan, axis, {}, wire=_Silent(), config=config, workspace=Workspace(torch.device("cpu"))
                )
                calls.clear()
                executor.run(dict.fromkeys(range(number)))
                counts.append(calls["run"])
                assert executor.num_orthogonalized == (number if strategy == "allgather" else number // 2)
            assert counts == [1, 1], strategy
    finally:
        NewtonSchulz.__call__, NewtonSchulz.factor = original  # type: ignore[method-assign]


class _Silent:
    """A wire on which zeros arrive."""

    def _send(self, output: torch.Tensor, *_: Any) -> "_Silent":
        output.zero_()
        return self

    all_gather = reduce_scatter = all_to_all = broadcast = _send

    def wait(self) -> None:
        pass
