"""Running a plan: by one product per weight, and by operations on lists as accelerators do."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.plan import build_plan
from hp_muon_plugin.muon.stage_tools import apply_updates
from muon.ns_inputs import gaussian
from muon.test_newton_schulz import Counter

CPU = torch.device("cpu")


def specs() -> list[ParamSpec]:
    views = [
        plain_matrix(24, 96),
        plain_matrix(96, 24),
        stacked_matrices(3, 24, 40),
        fused.qkv_view(2, 3, 8, 24),
        fused.qkv_view(2, 3, 8, 24, per_head=True),
        fused.gated_view(24, 50),
        plain_matrix(64, 64),
        plain_matrix(1, 30),
    ]
    return [ParamSpec(f"w{i}", Role.matrix, view.factors, view=view) for i, view in enumerate(views)]


def steps_of(
    params: list[ParamSpec], weight_dtype: torch.dtype, grad_dtype: torch.dtype, betas: Sequence[float] = (0.95,)
) -> list[ParamStep | None]:
    return [
        ParamStep(
            gaussian(spec.numel, seed=3 * i).to(weight_dtype),
            gaussian(spec.numel, seed=3 * i + 1).to(grad_dtype),
            gaussian(spec.numel, seed=3 * i + 2),
            0.9 + 0.01 * i,
            0.1 * (i + 1),
            betas[i % len(betas)],
        )
        for i, spec in enumerate(params)
    ]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    list(itertools.product([torch.float32, torch.bfloat16], repeat=2)),
    ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""),
)
def test_lists_and_products_update_alike(dtypes: tuple[torch.dtype, torch.dtype], nesterov: bool) -> None:
    found, betas = [], (0.95, 0.8, 0.0)
    for by_lists, device in ((False, "cpu"), (True, "cpu"), (True, "cuda")):
        plan = build_plan(specs(), HpMuon(), device=device)  # cuda: its plan, with padding, run here
        steps = steps_of(list(plan.params), *dtypes, betas)
        steps[1] = None
        executor = Executor(plan, {}, nesterov=nesterov, device=CPU, is_fused_by_lists=by_lists)
        executor.run(steps)
        assert executor.num_orthogonalized == plan.num_matrices - 1
        found.append([step.weight for step in steps if step is not None])
        for step, fresh in zip(steps, steps_of(list(plan.params), *dtypes, betas), strict=True):
            if step is not None and fresh is not None:
                assert torch.equal(step.grad, fresh.grad)
                assert torch.equal(step.momentum, fresh.momentum)
                assert not torch.equal(step.weight, fresh.weight)
    tolerance = 5e-5 if dtypes[0] is torch.float32 else 2e-2
    for others in found[1:]:
        for left, right in zip(found[0], others, strict=True):
            torch.testing.assert_close(right, left, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
def test_launches_for_lists_do_not_grow_with_the_parameters(nesterov: bool) -> None:
    counts = []
    for number in (70, 140):
        plan = build_plan(
            [ParamSpec(f"w{i}", Role.matrix, (24, 96), view=plain_matrix(24, 96)) for i in range(number)], HpMuon()
        )
        steps = steps_of(list(plan.params), torch.float32, torch.float32)
        executor = Executor(plan, {}, nesterov=nesterov, device=CPU, is_fused_by_lists=True)
        executor.run(steps)
        with Counter() as counter:
            executor.run(steps)
        counts.append(len(counter.kernels))
    assert counts[0] == counts[1] <= 30 + 5


@pytest.mark.parametrize("by_lists", [True, False])
def test_nothing_to_update_runs_nothing(by_lists: bool) -> None:
    plan = build_plan(specs(), HpMuon())
    executor = Executor(plan, {}, nesterov=True, device=CPU, is_fused_by_lists=by_lists)
    executor.run([None] * len(plan.params))
    assert executor.num_orthogonalized == 0


def test_decay_of_half_precision_weights_is_not_rounded_to_their_type() -> None:
    """torch's slow path for lists rounds factors to bfloat16: 0.99 to 0.9883, and 0.999 to 1."""
    weight, update = torch.linspace(1, 2, 100).bfloat16(), torch.zeros(100)
    wanted = weight.clone().mul_(0.99)
    apply_updates([weight], [0.99], [update], [1.0])
    assert torch.equal(weight, wanted)
