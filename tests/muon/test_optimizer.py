"""The optimizer on one process, against the float64 reference and against public bug reports."""

import copy
import math
from typing import Any

import pytest
import torch

from hp_muon_plugin.config.choices import FloatDtype, MissingGrad, NonFinite, ScaleMode, Schedule
from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigError, GradientError
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon import HpMuonOptimizer, build_adamw, build_optimizer
from hp_muon_plugin.muon.reference import ReferenceAdamW, ReferenceMuon


def model_of(*layers: torch.nn.Module) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.copy_(0.3 * torch.randn(param.shape, generator=generator) + (param.dim() == 1))
    return model


def set_grads(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def single(
    shape: tuple[int, ...], *, view: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, HpMuonOptimizer]:
    """One Muon parameter and its optimizer."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(shape).to(dtype))
    spec = ParamSpec("w", Role.matrix, shape, view=view or plain_matrix(*shape))
    config = HpMuon(**({"adamw": ScalarAdamW(lr=1e-3)} | options))
    return param, HpMuonOptimizer([{"params": [param], "algorithm": "muon"}], {param: spec}, config)


def test_twenty_steps_equal_the_float64_reference() -> None:
    model = model_of(torch.nn.Embedding(20, 12), torch.nn.Linear(12, 30), torch.nn.Linear(30, 8))
    optimizer = build_optimizer(model, lr=0.02, weight_decay=0.1, adamw={"lr": 0.01, "betas": [0.8, 0.9]})
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


@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (6, 6)])
def test_weight_decay_does_not_depend_on_the_shape(shape: tuple[int, int]) -> None:
    """muonium 0.2.0: decay was multiplied by the shape factor, 0.98 instead of 0.99 for (16, 4)."""
    param, optimizer = single(shape, lr=0.1, weight_decay=0.1, scale=ScaleMode.shape_scaling)
    param.data.fill_(1.0)
    param.grad = torch.zeros(shape)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full(shape, 0.99), rtol=1e-7, atol=0)


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


def test_fused_qkv_equals_three_separate_weights() -> None:
    """xtuner PR 2030: a fused QKV orthogonalised as one matrix differs by 42 percent."""
    groups, queries, size, cols = 2, 2, 4, 16
    view = fused.qkv_view(groups, queries, size, cols)
    whole, optimizer = single((groups * (queries + 2) * size, cols), view=view, lr=0.1)
    blocks = whole.detach().view(groups, queries + 2, size, cols)
    pieces = [blocks[:, :queries], blocks[:, queries : queries + 1], blocks[:, queries + 1 :]]
    parts = [torch.nn.Parameter(piece.reshape(-1, cols).clone()) for piece in pieces]
    specs = {
        p: ParamSpec(str(i), Role.matrix, tuple(p.shape), view=plain_matrix(*p.shape)) for i, p in enumerate(parts)
    }
    apart = HpMuonOptimizer([{"params": parts, "algorithm": "muon"}], specs, HpMuon(lr=0.1))
    for step in range(5):
        whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        grads = whole.grad.view(groups, queries + 2, size, cols)
        chosen = (grads[:, :queries], grads[:, queries : queries + 1], grads[:, queries + 1 :])
        for part, grad in zip(parts, chosen, strict=True):
            part.grad = grad.reshape(-1, cols)
        optimizer.step()
        apart.step()
    got = whole.detach().view(groups, queries + 2, size, cols)
    for part, piece in zip(
        parts, (got[:, :queries], got[:, queries : queries + 1], got[:, queries + 1 :]), strict=True
    ):
        torch.testing.assert_close(part.detach(), piece.reshape(-1, cols), rtol=1e-6, atol=1e-7)


def test_gate_and_up_equal_two_separate_weights() -> None:
    """Megatron #7077: the gated first layer was orthogonalised as one matrix."""
    whole, optimizer = single((16, 8), view=fused.gated_view(8, 8), lr=0.1)
    gate, alone = single((8, 8), lr=0.1)
    gate.data.copy_(whole.detach()[:8])
    whole.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    gate.grad = whole.grad[:8].clone()
    optimizer.step()
    alone.step()
    torch.testing.assert_close(whole.detach()[:8], gate.detach(), rtol=1e-6, atol=1e-7)
    fused_whole, fused_optimizer = single((16, 8), lr=0.1)
    fused_whole.grad = whole.grad.clone()
    fused_optimizer.step()
    assert float((fused_whole.detach()[:8] - gate.detach()).norm()) > 0.05


def test_experts_are_never_one_stacked_matrix() -> None:
    """dmuon flattens [E, M, N] to [E, M*N]; the update is then 73 percent off."""
    stacked, optimizer = single((4, 8, 16), view=stacked_matrices(4, 8, 16), lr=0.1)
    flat, flattened = single((32, 16), view=stacked_matrices(4, 8, 16), lr=0.1)
    flat.data.copy_(stacked.detach().view(32, 16))
    grad = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    stacked.grad, flat.grad = grad, grad.view(32, 16).clone()
    optimizer.step()
    flattened.step()
    assert torch.equal(stacked.detach().view(32, 16), flat.detach())
    one, alone = single((8, 16), lr=0.1)
    torch.manual_seed(1)
    one.data.copy_(torch.randn(4, 8, 16)[2])
    one.grad = grad[2].clone()
    alone.step()
    torch.testing.assert_close(stacked.detach()[2], one.detach(), rtol=1e-6, atol=1e-7)


def test_result_does_not_depend_on_how_matrices_are_batched() -> None:
    shapes = [(6, 10), (10, 6), (6, 10), (4, 4), (10, 10)]
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(shapes)]
    )
    together = build_optimizer(model, lr=0.1)
    singles = []
    for param in model:
        clone = torch.nn.Parameter(param.detach().clone())
        singles.append((clone, build_optimizer([("w", clone)], lr=0.1)))
    for index, param in enumerate(model):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(50 + index))
        singles[index][0].grad = param.grad.clone()
    together.step()
    for param, (clone, alone) in zip(model, singles, strict=True):
        alone.step()
        torch.testing.assert_close(param.detach(), clone.detach(), rtol=1e-6, atol=1e-7)


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
    param, optimizer = single((8, 8), lr=0.1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["algorithm"] = "adamw"
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["algorithm"] == "muon"


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


def test_non_finite_choice_is_typed() -> None:
    assert HpMuon().non_finite is NonFinite.skip
