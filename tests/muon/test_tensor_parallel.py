"""Matrices cut over tensor-parallel ranks: the update does not depend on how many ranks share them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import joined, run_ranks

from hp_muon_plugin.config.choices import Schedule, TensorParallelMode
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import AxisSplit, MatrixView, ParamSpec, Role, plain_matrix
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.matrix_view import fill_from_shards, local_slice
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer
from hp_muon_plugin.muon.reference import ReferenceMuon, reference_newton_schulz
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.train.setup import Launch

STEPS = 20
KELLER = resolve_schedule(Schedule.keller)
WEIGHTS: dict[str, tuple[tuple[int, ...], MatrixView, tuple[int, ...], int]] = {
    "column": ((24, 16), plain_matrix(24, 16), (24, 16), 0),
    "row": ((16, 24), plain_matrix(16, 24), (16, 24), 1),
    "gated": ((48, 16), fused.gated_view(24, 16), (2, 24, 16), 1),
    "qkv": ((96, 16), fused.qkv_view(12, 2, 2, 16), (96, 16), 0),
    "one group": ((24, 16), fused.qkv_view(1, 4, 4, 16), (24, 16), 0),
    "per head": ((96, 16), fused.qkv_view(12, 2, 2, 16, per_head=True), (96, 16), 0),
    "whole": ((16, 16), plain_matrix(16, 16), (), 0),
}


def values(name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    return torch.randn(WEIGHTS[name][0], generator=generator)


def _steps(launch: Launch, mode: TensorParallelMode) -> Any:
    joined(launch)
    assert dist.group.WORLD is not None
    axis = AxisGroup.from_group("tp", dist.group.WORLD)
    params, specs = [], {}
    for name, (shape, view, factors, dim) in WEIGHTS.items():
        split = AxisSplit("tp", axis.size, factors, dim) if factors else None
        spec = ParamSpec(name, Role.matrix, shape, view=view, split=split)
        param = torch.nn.Parameter(_own(values(name, 0), spec, axis))
        params.append(param)
        specs[param] = spec
    config = HpMuon(lr=0.1, clip_grad=0.0, tp_mode=mode)
    optimizer = HpMuonOptimizer([{"params": params, "algorithm": "muon"}], specs, config, axes={"tp": axis})
    for step in range(STEPS):
        for param in params:
            param.grad = _own(values(specs[param].name, step + 1), specs[param], axis)
        optimizer.step()
    return {specs[p].name: p.detach() for p in params}, optimizer.num_orthogonalized, optimizer.plan


def _own(whole: torch.Tensor, spec: ParamSpec, axis: AxisGroup) -> torch.Tensor:
    return whole if spec.split is None else local_slice(whole, spec.split, axis.index).clone()


# 2, 3 and 4 ranks in every mode, with more weights and options, in 4 steps: test_tp_modes.py
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        *((ranks, TensorParallelMode.duplicated) for ranks in (1, 2, 3, 4, 6, 8)),
        *(
            (ranks, mode)
            for ranks in (1, 2, 3, 4, 6, 8)
            for mode in (TensorParallelMode.distributed, TensorParallelMode.owner)
        ),
    ],
)
def test_the_update_is_that_of_the_whole_matrix(ranks: int, mode: TensorParallelMode) -> None:
    """DeepSpeed #8437: each shard was orthogonalised by itself, cosine 0.936 with the right update."""
    results = run_ranks(ranks, _steps, mode)
    for name, (shape, view, factors, dim) in WEIGHTS.items():
        rule, wanted = ReferenceMuon(view, KELLER), values(name, 0).double()
        for step in range(STEPS):
            wanted = rule.step(wanted, values(name, step + 1), lr=0.1, weight_decay=0.1)
        got = torch.empty(shape)
        if factors:
            split = AxisSplit("tp", ranks, factors, dim)
            shards = torch.stack([result[0][name].reshape(-1) for result in results])
            fill_from_shards(got.view(-1), shards, split)
        else:
            got = results[0][0][name]
        assert float((got - wanted).norm() / wanted.norm()) < 1e-6, name
    if mode is TensorParallelMode.duplicated:
        sent = sum(stage.local_numel for stage in results[0][2].stages if stage.axis)
        assert results[0][2].received_bytes == 4 * sent * (ranks - 1)


def test_shards_orthogonalised_apart_would_be_forty_percent_off() -> None:
    """What the test above would see if the shards were not put together."""
    matrix = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = reference_newton_schulz(matrix, KELLER)
    halves = torch.cat([reference_newton_schulz(half, KELLER) for half in matrix.split(4)])
    assert float((halves - whole).norm() / whole.norm()) == pytest.approx(0.40, abs=0.05)
