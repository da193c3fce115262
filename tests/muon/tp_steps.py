"""Muon steps on tensor-parallel ranks, and the reference that they must reproduce."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from dist_pool import joined

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.layout import fused
from hp_muon_plugin.layout.spec import AxisSplit, MatrixView, ParamSpec, Role, plain_matrix, stacked_matrices
from hp_muon_plugin.muon.coefficients import resolve_schedule
from hp_muon_plugin.muon.executor import Executor, ParamStep
from hp_muon_plugin.muon.matrix_view import fill_from_shards, local_slice
from hp_muon_plugin.muon.plan import MuonPlan, build_plan
from hp_muon_plugin.muon.reference import ReferenceMuon
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.strict import StrictWire
from hp_muon_plugin.platform.wire import C10dWire, Collective
from hp_muon_plugin.train.setup import Launch

CPU = torch.device("cpu")
LR, DECAY, BETA = 0.1, 0.1, 0.95
Weights = dict[str, tuple[tuple[int, ...], MatrixView, tuple[int, ...], int]]
WEIGHTS: Weights = {
    "column, tall": ((48, 16), plain_matrix(48, 16), (48, 16), 0),
    "column, wide": ((24, 60), plain_matrix(24, 60), (24, 60), 0),
    "column, square": ((24, 24), plain_matrix(24, 24), (24, 24), 0),
    "row, wide": ((16, 48), plain_matrix(16, 48), (16, 48), 1),
    "row, tall": ((60, 24), plain_matrix(60, 24), (60, 24), 1),
    "gated": ((96, 16), fused.gated_view(48, 16), (2, 48, 16), 1),
    "gated in one": ((96, 16), fused.gated_view(48, 16, split=False), (2, 48, 16), 1),
    "qkv": ((12 * 16, 40), fused.qkv_view(12, 2, 4, 40), (12 * 16, 40), 0),
    "one group": ((24 * 6, 16), fused.qkv_view(1, 4, 24, 16), (24 * 6, 16), 0),
    "per head": ((96, 16), fused.qkv_view(12, 2, 2, 16, per_head=True), (96, 16), 0),
    "experts": ((12, 5, 7), stacked_matrices(12, 5, 7), (12, 5, 7), 0),
    "legacy experts": ((2, 16, 48), fused.grouped_first_view(2, 16, 48, gated=True), (2, 16, 2, 24), 3),
    "tiny": ((12, 4), plain_matrix(12, 4), (12, 4), 0),
    "whole": ((16, 16), plain_matrix(16, 16), (), 0),
}


@dataclass
class Job:
    """What ranks do.

    Attributes:
        config: Options.
        weights: Parameters.
        missing: Names without a gradient, by step.
        dtypes: Of weight, gradient and momentum.
        scales: Factor of the gradients by name.
        holes: Names whose gradient has one NaN, on the last rank.
        device: Whose plan.
        max_stage_bytes: Of a stage.
        by_lists: Way of local stages.
        axis: Name of the axis.
    """

    config: HpMuon
    weights: Weights = field(default_factory=lambda: WEIGHTS)
    missing: tuple[frozenset[str], ...] = (frozenset(), frozenset(), frozenset())
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3
    scales: dict[str, float] = field(default_factory=dict)
    holes: frozenset[str] = frozenset()
    device: str = "cpu"
    max_stage_bytes: int = 256 << 20
    by_lists: bool = False
    axis: str = "tp"

    def values(self, name: str, seed: int) -> torch.Tensor:
        """The weight (seed 0) or the gradient of a step, whole."""
        generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
        value = torch.randn(self.weights[name][0], generator=generator)
        return value if seed == 0 else value * self.scales.get(name, 1.0)

    def specs(self, size: int) -> list[ParamSpec]:
        """Specs of all parameters."""
        return [
            ParamSpec(name, Role.matrix, shape, view=view, split=AxisSplit(self.axis, size, cut, dim) if cut else None)
            for name, (shape, view, cut, dim) in self.weights.items()
        ]

    def plan(self, size: int) -> MuonPlan:
        """The plan of every rank."""
        return build_plan(self.specs(size), self.config, device=self.device, max_stage_bytes=self.max_stage_bytes)

    def reference(self, name: str) -> torch.Tensor:
        """The whole weight after all steps, in float64."""
        config, view = self.config, self.weights[name][1]
        rule = ReferenceMuon(view, resolve_schedule(config.schedule), scale=config.scale)
        wanted = self.values(name, 0).to(self.dtypes[0]).double()
        for step, missing in enumerate(self.missing):
            if name not in missing:
                grad = self.values(name, step + 1).to(self.dtypes[1])
                wanted = rule.step(wanted, grad, lr=LR, weight_decay=DECAY)
        return wanted

    def whole(self, name: str, results: list["Answer"]) -> torch.Tensor:
        """Put the ranks' weights together."""
        shape, _, cut, dim = self.weights[name]
        if not cut:
            assert all(torch.equal(results[0].weights[name], result.weights[name]) for result in results)
            return results[0].weights[name]
        got = torch.empty(shape, dtype=self.dtypes[0])
        shards = torch.stack([result.weights[name].reshape(-1) for result in results])
        fill_from_shards(got.view(-1), shards, AxisSplit(self.axis, len(results), cut, dim))
        return got

    def errors(self, results: list["Answer"]) -> dict[str, float]:
        """Relative difference from the reference by name."""
        errors = {}
        for name in self.weights:
            wanted = self.reference(name)
            errors[name] = float((self.whole(name, results).double() - wanted).norm() / wanted.norm())
        return errors


@dataclass
class Answer:
    """What one rank returns.

    Attributes:
        weights: Its part of each.
        received: Bytes of one step, from the counted collectives.
        num_collectives: Of one step.
        num_orthogonalized: In all steps.
        workspace_bytes: Buffers.
    """

    weights: dict[str, torch.Tensor]
    received: int
    num_collectives: int
    num_orthogonalized: int
    workspace_bytes: int


def run_job(launch: Launch, job: Job) -> Answer:
    """All steps on one rank, over a wire that enforces HCCL's rules."""
    joined(launch)
    assert dist.group.WORLD is not None
    axis = AxisGroup.from_group(job.axis, dist.group.WORLD)
    wire = CountingWire(StrictWire(C10dWire()))
    executor = Executor(
        job.plan(axis.size), {job.axis: axis}, nesterov=True, device=CPU, is_fused_by_lists=job.by_lists, wire=wire
    )
    specs = job.specs(axis.size)
    weights = {s.name: _own(job.values(s.name, 0), s, axis).to(job.dtypes[0]) for s in specs}
    momenta = {name: torch.zeros_like(weight, dtype=job.dtypes[2]) for name, weight in weights.items()}
    counts = []
    for number, missing in enumerate(job.missing):
        steps: list[ParamStep | None] = []
        for spec in specs:
            if spec.name in missing:
                steps.append(None)
                continue
            grad = _own(job.values(spec.name, number + 1), spec, axis).to(job.dtypes[1])
            if spec.name in job.holes and axis.index == axis.size - 1:
                grad.view(-1)[3] = torch.nan
            momentum = momenta[spec.name].mul_(BETA).add_(grad, alpha=1 - BETA)
            steps.append(ParamStep(weights[spec.name], grad, momentum, 1 - LR * DECAY, LR, BETA))
        wire.reset()
        executor.run(steps)
        counts.append(wire.counts())
    traffic = counts[0]
    received = 0
    for (kind, _), seen in traffic.items():
        share = {Collective.ALL_GATHER: axis.size - 1, Collective.ALL_REDUCE: 2 * (axis.size - 1)}
        received += seen.num_bytes * share[kind] // axis.size if kind in share else seen.num_bytes
    num_collectives = sum(seen.num_collectives for seen in traffic.values())
    return Answer(weights, received, num_collectives, executor.num_orthogonalized, executor.workspace_bytes)


def _own(whole: torch.Tensor, spec: ParamSpec, axis: AxisGroup) -> torch.Tensor:
    return whole if spec.split is None else local_slice(whole, spec.split, axis.index).contiguous().clone()


def counted(plan: MuonPlan, index: int) -> tuple[int, int]:
    """Bytes and calls that the plan says for one rank."""
    collectives: list[Any] = [c for stage in plan.stages for c in stage.collectives(index)]
    return sum(c.received_bytes for c in collectives), sum(c.num_calls for c in collectives)
