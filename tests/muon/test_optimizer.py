"""The optimizer on one process, against the float64 reference and against public bug reports."""

import math
from typing import Any

import pytest
import torch

from hp_muon_plugin.config.choices import ScaleMode, Schedule
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec, Role
from hp_muon_plugin.muon import HpMuonOptimizer, build_adamw, build_optimizer
from hp_muon_plugin.muon.reference import ReferenceAdamW, ReferenceMuon
from muon.small_models import model_of, set_grads, single


# seen: 7.4e-8 and, with 8 bits of momentum, 1.1e-4; a wrong momentum in one step is 6e-3
@pytest.mark.parametrize(("momentum_dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-3)])
def test_momentum_of_a_group_counts(momentum_dtype: str, tolerance: float) -> None:
    """``group["momentum"]`` was written and never read, so a momentum warm-up had no effect."""
    param, optimizer = single((12, 30), lr=0.1, momentum_dtype=momentum_dtype)
    rule = ReferenceMuon(optimizer.specs[param].view, optimizer.plan.coefficients)
    wanted = param.detach().double()
    for step, momentum in enumerate((0.5, 0.8, 0.95)):
        (group,) = optimizer.param_groups
        group["momentum"] = rule.momentum = momentum
        param.grad = torch.randn(12, 30, generator=torch.Generator().manual_seed(step))
        wanted = rule.step(wanted, param.grad, lr=0.1, weight_decay=group["weight_decay"])
        optimizer.step()
    assert float((param.detach() - wanted).norm() / wanted.norm()) < tolerance


def test_twenty_steps_equal_the_float64_reference() -> None:
    model = model_of(torch.nn.Embedding(20, 12), torch.nn.Linear(12, 30), torch.nn.Linear(30, 8))
    options = {"lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 0.01, "betas": [0.8, 0.9]}}
    optimizer = build_optimizer(model, clip_grad=0.0, **options)
    rules: dict[torch.nn.Parameter, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            view = optimizer.specs[param].view
            muon = group["algorithm"] == "muon"
            rules[param] = ReferenceMuon(view, optimizer.plan.coefficients) if muon else ReferenceAdamW((0.8, 0.9))
    wanted = {param: param.detach().double() for param in rules}
    for step in range(20):
        set_grads(model, step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                wanted[param] = rules[param].step(
                    wanted[param], param.grad, lr=group["lr"], weight_decay=group["weight_decay"]
                )
        optimizer.step()
    for param, value in wanted.items():
        assert float((param.detach() - value).norm() / value.norm()) < 2e-6, optimizer.specs[param].name


def test_newton_schulz_is_called_once_per_matrix_and_step() -> None:
    """DeepSpeed #8441: at stage 0 Muon trained with plain SGD, zero calls, and said nothing."""
    model = model_of(torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(5, 4, bias=False))
    optimizer = build_optimizer(model, lr=0.01, weight_decay=0.0)
    set_grads(model, 0)
    before, grad = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    optimizer.step()
    assert optimizer.num_orthogonalized == 2
    moved = (model[0].weight.detach() - before).norm()
    assert abs(float(moved) - 0.01 * float(grad.norm())) > 1e-3


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (6, 6)])
def test_weight_decay_does_not_depend_on_the_shape(shape: tuple[int, int]) -> None:
    """muonium 0.2.0: decay was multiplied by the shape factor, 0.98 instead of 0.99 for (16, 4)."""
    param, optimizer = single(shape, lr=0.1, weight_decay=0.1, scale=ScaleMode.shape_scaling)
    param.data.fill_(1.0)
    param.grad = torch.zeros(shape)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full(shape, 0.99), rtol=1e-7, atol=0)


def test_accumulated_gradients_give_the_step_of_the_whole_batch() -> None:
    """DeepSpeed #8443: Newton-Schulz ran once per micro-batch, a 10 percent difference."""
    torch.manual_seed(0)
    data = torch.randn(8, 6)
    results = []
    for pieces in (1, 4):
        model = model_of(torch.nn.Linear(6, 6, bias=False))
        optimizer = build_optimizer(model, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for piece in data.chunk(pieces):
                (model(piece).square().mean() / pieces).backward()
            optimizer.step()
        assert optimizer.num_orthogonalized == 3
        results.append(model[0].weight.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_clipping_logits_is_refused_where_attention_layers_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.qk_clip.*only Megatron's models tell"):
        build_optimizer(torch.nn.Sequential(torch.nn.Linear(4, 4)), qk_clip=100.0)


def test_schedulers_keep_the_ratio_of_learning_rates() -> None:
    """DeepSpeed #7713: a scheduler forced both groups to one learning rate."""
    model = model_of(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build_optimizer(model, lr=0.02, adamw={"lr": 0.001})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
        scheduler.step()
        rates = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
        assert rates["muon"] == pytest.approx(20 * rates["adamw"])
        assert rates["muon"] == pytest.approx(0.02 / (2 + step))


def test_the_output_layers_learning_rate_does_not_depend_on_its_width() -> None:
    """dion PR 94: AdamW's was divided by the root of the width, 0.036 times for 768, which is for Lion alone."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 8), "lm_head": torch.nn.Linear(768, 16, bias=False)})
    optimizer = build_optimizer(model, adamw={"lr": 0.01, "weight_decay": 0.0}, clip_grad=0.0)
    before = model["lm_head"].weight.detach().clone()
    set_grads(model, 0)
    optimizer.step()
    torch.testing.assert_close((model["lm_head"].weight.detach() - before).abs(), torch.full((16, 768), 0.01))


def test_weights_stay_bounded_with_decay_and_grow_without() -> None:
    """Moonlight: without decay the root-mean-square of weights grows past what bf16 resolves."""
    norms = {}
    for decay in (0.0, 0.1):
        param, optimizer = single((16, 16), lr=0.02, weight_decay=decay, scale=ScaleMode.none)
        param.data.zero_()
        generator = torch.Generator().manual_seed(0)
        for _ in range(500):
            param.grad = torch.randn(16, 16, generator=generator)
            optimizer.step()
        norms[decay] = float(torch.linalg.matrix_norm(param.detach(), 2))
    assert norms[0.1] < 1.2 / 0.1  # the fixed point is at most (largest singular value) / decay
    assert norms[0.1] < norms[0.0]


def test_an_optimizer_without_any_matrix_still_steps() -> None:
    """torchtitan: a pipeline stage without matrices failed to build."""
    norm = torch.nn.Parameter(torch.ones(4))
    spec = ParamSpec("norm.weight", Role.norm, (4,))
    optimizer = HpMuonOptimizer(
        [{"params": [], "algorithm": "muon"}, {"params": [norm], "algorithm": "adamw"}], {norm: spec}, HpMuon()
    )
    norm.grad = torch.ones(4)
    optimizer.step()
    assert float(norm.detach()[0]) < 1.0


def test_one_row_is_updated_along_the_gradient() -> None:
    param, optimizer = single((1, 30), lr=0.1, weight_decay=0.0, scale=ScaleMode.none)
    grad = torch.randn(1, 30, generator=torch.Generator().manual_seed(0))
    before = param.detach().clone()
    param.grad = grad
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), 0.1 * 0.6964 * grad / grad.norm(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("schedule", [s for s in Schedule if s is not Schedule.custom])
def test_every_schedule_trains(schedule: Schedule) -> None:
    param, optimizer = single((6, 9), lr=0.1, schedule=schedule)
    target = torch.randn(6, 9, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (param - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_closure_is_called_with_gradients_enabled() -> None:
    param, optimizer = single((4, 4))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    before = float(param.detach().square().sum())
    assert float(optimizer.step(closure)) == pytest.approx(before)
    assert float(param.detach().square().sum()) < before


def test_wrong_options_name_themselves() -> None:
    with pytest.raises(ConfigError, match=r"did you mean optimizer\.momentum\?"):
        build_optimizer(torch.nn.Linear(4, 4), momentm=0.3)
    with pytest.raises(ConfigError, match="AdamW cannot share optimizer.lr with optimizer.scale=spectral"):
        build_optimizer(torch.nn.Linear(4, 4), scale="spectral")
    with pytest.raises(ConfigError, match=r"optimizer\.momentum=1\.5"):
        build_optimizer(torch.nn.Linear(4, 4), momentum=1.5)


def test_the_baseline_decays_matrices_only() -> None:
    optimizer = build_adamw(model_of(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), lr=1e-3, weight_decay=0.1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert math.isclose(optimizer.param_groups[0]["lr"], 1e-3)
