"""Fused weights and batches: every matrix is orthogonalised as if it stood alone."""

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon import HpMuonOptimizer, build_optimizer
from muon.small_models import single


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
    apart = HpMuonOptimizer([{"params": parts, "algorithm": "muon"}], specs, HpMuon(lr=0.1, clip_grad=0.0))
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
    whole.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    halves = []
    for rows in (slice(0, 8), slice(8, 16)):
        half, alone = single((8, 8), lr=0.1)
        half.data.copy_(whole.detach()[rows])
        half.grad = whole.grad[rows].clone()
        alone.step()
        halves.append(half.detach())
    gate, _ = halves
    optimizer.step()
    torch.testing.assert_close(whole.detach(), torch.cat(halves), rtol=1e-6, atol=1e-7)
    fused_whole, fused_optimizer = single((16, 8), lr=0.1)
    fused_whole.grad = whole.grad.clone()
    fused_optimizer.step()
    assert float((fused_whole.detach()[:8] - gate).norm()) > 0.05


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
