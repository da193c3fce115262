"""Clipping by the global norm in plain PyTorch, on one process and on ranks that hold parts."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks

from hp_muon_plugin.config.choices import ClipMode
from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.errors import ConfigErrors
from hp_muon_plugin.layout.spec import AxisSplit, ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon import HpMuonOptimizer, build_adamw, build_optimizer
from hp_muon_plugin.platform.collectives import AxisGroup, group_device
from hp_muon_plugin.train.setup import Launch
from muon.small_models import model_of, set_grads


def clipped(**options: Any) -> tuple[torch.nn.Module, Any, dict[str, float]]:
    """A model after one step; the norm of each algorithm's gradients as the update saw them."""
    model = model_of(torch.nn.Embedding(6, 8), torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))
    optimizer = build_optimizer(model, **options)
    set_grads(model, 0)
    optimizer.step()
    norms = {"muon": 0.0, "adamw": 0.0}
    for group in optimizer.param_groups:
        squares = sum(float(p.grad.double().square().sum()) for p in group["params"])
        norms[group["algorithm"]] = math.hypot(norms[group["algorithm"]], math.sqrt(squares))
    return model, optimizer, norms


def test_the_global_norm_is_clipped_and_reported() -> None:
    """``build_optimizer(model, clip_grad=1e-3)`` and ``clip_grad=0`` gave bit-equal weights."""
    free, free_optimizer, raw = clipped(clip_grad=0.0)
    bound, optimizer, seen = clipped(clip_grad=1e-3)
    assert math.hypot(*raw.values()) > 5
    assert math.hypot(*seen.values()) == pytest.approx(1e-3, rel=1e-3)
    for norms in (optimizer.grad_norms_last, free_optimizer.grad_norms_last):
        assert norms.total == pytest.approx(math.hypot(*raw.values()), rel=1e-5)
        assert (norms.muon, norms.adamw) == pytest.approx((raw["muon"], raw["adamw"]), rel=1e-5)
    momenta = [o.state[m[1].weight]["momentum_buffer"] for m, o in ((free, free_optimizer), (bound, optimizer))]
    torch.testing.assert_close(momenta[1], momenta[0] * 1e-3 / math.hypot(*raw.values()), rtol=1e-4, atol=0)


def test_clipping_goes_by_the_mode() -> None:
    *_, raw = clipped(clip_grad=0.0)
    *_, seen = clipped(clip_grad=0.01, clip_mode="adamw_only")
    assert seen["muon"] == pytest.approx(raw["muon"])
    assert seen["adamw"] == pytest.approx(0.01, rel=1e-3)
    *_, seen = clipped(clip_grad=0.01, clip_mode="none")
    assert seen == pytest.approx(raw)


def test_clipping_equals_torchs_and_clipping_twice_changes_nothing() -> None:
    """An application that clips by itself at the same norm trains as before."""
    results = []
    for clips_itself in (False, True):
        model = model_of(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6))
        optimizer = build_optimizer(model, clip_grad=0.5)
        for step in range(3):
            set_grads(model, step)
            if clips_itself:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                before = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            if clips_itself:
                assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
        results.append([p.detach().clone() for p in model.parameters()])
    for ours, both in zip(*results, strict=True):
        torch.testing.assert_close(ours, both, rtol=1e-6, atol=1e-7)


def test_gradients_below_the_norm_are_left_bit_for_bit() -> None:
    model = model_of(torch.nn.Linear(6, 6))
    optimizer = build_optimizer(model, clip_grad=1e3)
    set_grads(model, 0)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


def test_huge_gradients_are_clipped_without_overflow() -> None:
    """Their squares overflow float32; the step is neither lost nor left out."""
    huge, plain = (model_of(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)) for _ in range(2))
    optimizers = [build_optimizer(model, clip_grad=0.5) for model in (huge, plain)]
    for model, factor in ((huge, 1e25), (plain, 1.0)):
        set_grads(model, 3)
        for param in model.parameters():
            param.grad *= factor
    for optimizer in optimizers:
        optimizer.step()
    norms = [optimizer.grad_norms_last for optimizer in optimizers]
    assert norms[0].total == pytest.approx(1e25 * norms[1].total, rel=1e-5)
    assert optimizers[0].skipped_steps == 0
    for left, right in zip(huge.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_the_baseline_clips_too_with_and_without_a_closure() -> None:
    """``build_adamw`` read no clip_grad; a closure makes its gradients inside the step."""
    for with_closure in (False, True):
        model, expected = (model_of(torch.nn.Linear(4, 4)) for _ in range(2))
        ours = build_adamw(model, lr=0.1, clip_grad=1e-3, eps=1e-3, weight_decay=0.0)
        torchs = torch.optim.AdamW(expected.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
        for step in range(3):
            set_grads(expected, step)
            norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
            torchs.step()
            if with_closure:
                assert ours.step(lambda model=model, step=step: set_grads(model, step) or 7.0) == 7.0
            else:
                set_grads(model, step)
                ours.step()
            assert torch.equal(ours.grad_norm_last, norm)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_hooks_on_the_baseline_run_once() -> None:
    model, calls = model_of(torch.nn.Linear(4, 4)), []
    torch.optim.AdamW(copy.deepcopy(model).parameters())  # torch then wraps AdamW.step as well
    optimizer = build_adamw(model)
    optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    set_grads(model, 0)
    optimizer.step()
    assert calls == [1]


def test_options_of_the_baseline_are_checked() -> None:
    """``betas=[0.9]`` was a bare 'not enough values to unpack'."""
    with pytest.raises(ConfigErrors, match=r"(?s)optimizer.clip_grad=-1: .*optimizer.betas=\[0.9\]: needs two numbers"):
        build_adamw(torch.nn.Linear(4, 4), betas=[0.9], clip_grad=-1.0)


def _parts(launch: Launch, mode: ClipMode) -> Any:
    """Two weights over tensor-parallel ranks, one held whole by each, one vector; all ranks agree."""
    joined(launch)
    assert dist.group.WORLD is not None
    axis = AxisGroup.from_group("tp", dist.group.WORLD)
    generator = torch.Generator().manual_seed(5)
    params, specs = [], {}
    for name, dim in (("rows", 0), ("cols", 1), ("whole", None), ("norm", None)):
        whole = torch.randn((12, 12) if name != "norm" else (12,), generator=generator)
        split = None if dim is None else AxisSplit("tp", axis.size, (12, 12), dim)
        own = whole if dim is None else whole.chunk(axis.size, dim)[axis.index].contiguous()
        param = torch.nn.Parameter(own.clone())
        view = plain_matrix(12, 12) if whole.dim() == 2 else None
        specs[param] = ParamSpec(name, Role.matrix if view else Role.norm, tuple(whole.shape), view=view, split=split)
        param.grad = 3 * own
        params.append(param)
    config = HpMuon(clip_grad=0.1, clip_mode=mode, adamw=ScalarAdamW(lr=1e-3))
    groups = [{"params": params[:3], "algorithm": "muon"}, {"params": params[3:], "algorithm": "adamw"}]
    optimizer = HpMuonOptimizer(groups, specs, config, axes={"tp": axis}, agree=[axis])
    optimizer.step()
    grads = {specs[p].name: p.grad for p in params}
    return optimizer.grad_norms_last, grads, {specs[p].name: p.detach() for p in params}


@pytest.mark.parametrize("mode", list(ClipMode))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_a_weight_are_added_up_and_copies_counted_once(ranks: int, mode: ClipMode) -> None:
    ((alone, wanted, weights),) = run_ranks(1, _parts, mode)
    results = run_ranks(ranks, _parts, mode)
    for index, (norms, grads, _) in enumerate(results):
        assert (norms.total, norms.muon, norms.adamw) == pytest.approx((alone.total, alone.muon, alone.adamw), rel=1e-6)
        torch.testing.assert_close(grads["rows"], wanted["rows"].chunk(ranks, 0)[index], rtol=1e-6, atol=0)
        torch.testing.assert_close(grads["norm"], wanted["norm"], rtol=1e-6, atol=0)
    whole = torch.cat([result[2]["cols"] for result in results], dim=1)
    torch.testing.assert_close(whole, weights["cols"], rtol=1e-5, atol=1e-6)


def _bad_copy(launch: Launch) -> Any:
    """A NaN in one rank's copy of a weight that all hold whole, and nobody was told to agree."""
    joined(launch)
    assert dist.group.WORLD is not None
    axis = AxisGroup.from_group("tp", dist.group.WORLD)
    split, whole = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    specs = {
        split: ParamSpec("split", Role.matrix, (8, 4), view=plain_matrix(8, 4), split=AxisSplit("tp", 2, (8, 4), 0)),
        whole: ParamSpec("whole", Role.matrix, (4, 4), view=plain_matrix(4, 4)),
    }
    optimizer = HpMuonOptimizer([{"params": [split, whole], "algorithm": "muon"}], specs, HpMuon(), axes={"tp": axis})
    split.grad, whole.grad = torch.ones(4, 4), torch.full((4, 4), math.nan if launch.rank == 0 else 1.0)
    optimizer.step()
    return optimizer.skipped_steps, torch.equal(split.detach(), torch.ones(4, 4))


def test_ranks_that_share_a_weight_never_decide_differently() -> None:
    assert run_ranks(2, _bad_copy) == [(1, True)] * 2


def test_a_rank_without_tensors_reduces_on_the_device_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL it all-reduced a CPU tensor, and the other ranks waited."""
    axis = AxisGroup("world", 2, 0, object())  # type: ignore[arg-type]
    for backend, kind in (("nccl", "cuda"), ("hccl", "npu"), ("gloo", "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        if kind != "cpu":
            module = type("Module", (), {"current_device": staticmethod(lambda: 3)})
            monkeypatch.setattr(torch, kind, module, raising=False)
            monkeypatch.setattr(torch, "device", lambda *arguments: arguments)
        assert group_device(axis) == ((kind, 3) if kind != "cpu" else ("cpu",))
    monkeypatch.undo()
    assert group_device(AxisGroup.single("world")) == torch.device("cpu")
