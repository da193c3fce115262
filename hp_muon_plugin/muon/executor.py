"""Running a plan on tensors: make whole, orthogonalise, apply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.algorithm import Algorithm
from hp_muon_plugin.muon.matrix_view import fill_from_shards, local_slice, part_tensor, slot_like, tiles
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz
from hp_muon_plugin.muon.plan import Family, FusedBatch, MuonPlan, PlannedPart, Stage
from hp_muon_plugin.muon.stack import Stack, Target
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup, all_gather


@dataclass(slots=True)
class ParamStep:
    """What one parameter brings to a step.

    Attributes:
        weight: This rank's part of the weight, contiguous, any floating type; changed by the step.
        grad: Its gradient, any floating type; read only.
        momentum: Its moving average, already updated for this step.
        decay: Factor ``1 - lr * weight_decay``.
        lr: Learning rate.
        beta: Decay of the moving average, for the Nesterov look-ahead.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    decay: float
    lr: float
    beta: float


Steps = Sequence[ParamStep | None]


class Executor:
    """Runs the stages of a plan on this rank.

    Args:
        plan: The plan.
        axes: Mesh axes by name, at least those that the plan's stages gather over.
        nesterov: Whether to look ahead.
        device: Where the parameters live.
        is_fused_by_lists: Whether whole parameters are read and updated by operations on lists of
            tensors, instead of one product per weight. None: on accelerators, where launches cost more
            than another pass over the update.
        workspace: Buffers to share with executors that run at other times. None: its own.
    """

    def __init__(
        self,
        plan: MuonPlan,
        axes: Mapping[str, AxisGroup],
        *,
        nesterov: bool,
        device: torch.device,
        is_fused_by_lists: bool | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.plan = plan
        self._axes = axes
        self._nesterov = nesterov
        self._device = device
        self._is_fused_by_lists = device.type != "cpu" if is_fused_by_lists is None else is_fused_by_lists
        self._workspace = workspace or Workspace(device)
        self._engines: dict[Algorithm, NewtonSchulz] = {}
        self.num_orthogonalized = 0
        """Matrices orthogonalised by this rank since construction."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the reused buffers."""
        return self._workspace.nbytes

    def run(self, steps: Steps) -> None:
        """Update the weights of one step.

        Args:
            steps: One entry per parameter of the plan; None for a parameter that is left alone
                this step. The same entries are None on every rank of an axis that is gathered over.
        """
        for stage in self.plan.stages:
            if stage.axis is None:
                for batch in stage.batches:
                    self._run_lists(batch, steps) if self._is_fused_by_lists else self._run_whole(batch, steps)
            else:
                self._run_gathered(stage, steps, self._axes[stage.axis])

    def _run_whole(self, batch: FusedBatch, steps: Steps) -> None:
        """Every rank holds the parameters whole: the last product updates the weights."""
        stacks = []
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if steps[part.param] is not None]
            buffer = self._buffer("update", number, family, parts)
            targets, first = [], 0
            for part in parts:
                spec, step = self.plan.params[part.param], steps[part.param]
                assert step is not None
                slot = buffer[first : first + part.count]
                grad, momentum = _part(step.grad, spec, part), _part(step.momentum, spec, part)
                self._write_update(_factored(slot, spec, part), grad, momentum, step.beta)
                targets += self._weight_targets(step, spec, part, first)
                first += part.count
            stacks.append(Stack(buffer, tuple(targets), is_scratch=True))
        self._orthogonalize(batch, stacks)

    def _run_lists(self, batch: FusedBatch, steps: Steps) -> None:
        """As :meth:`_run_whole`, in a number of launches that does not grow with the parameters."""
        stacks, weights, decays, updates, scales = [], [], [], [], []
        momenta, slots = [], []
        ahead: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if steps[part.param] is not None]
            source = self._buffer("update", number, family, parts)
            result = self._buffer("result", number, family, parts)
            first = 0
            for part in parts:
                spec, step = self.plan.params[part.param], steps[part.param]
                assert step is not None
                chosen = slice(first, first + part.count)
                slots.append(_factored(source[chosen], spec, part))
                momenta.append(_part(step.momentum, spec, part))
                ahead.setdefault(step.beta, []).append((slots[-1], _part(step.grad, spec, part)))
                weights.append(_part(step.weight, spec, part))
                decays.append(step.decay)
                updates.append(_factored(result[chosen], spec, part))
                scales.append(-step.lr * part.scale)
                first += part.count
            stacks.append(Stack(source, (Target(result, 0, first),) if first else (), is_scratch=True))
        if not slots:
            return
        torch._foreach_copy_(slots, momenta)
        for beta, pairs in ahead.items() if self._nesterov else ():
            torch._foreach_lerp_([slot for slot, _ in pairs], [grad.to(slot.dtype) for slot, grad in pairs], 1 - beta)
        self._orthogonalize(batch, stacks)
        torch._foreach_mul_(updates, scales)
        torch._foreach_mul_(weights, decays)
        torch._foreach_add_(weights, updates)

    def _weight_targets(self, step: ParamStep, spec: ParamSpec, part: PlannedPart, first: int) -> list[Target]:
        assert spec.view is not None
        found = tiles(step.weight, spec.view, spec.view.parts[part.part])
        assert found is not None, f"{spec.name}: rows and columns of its matrices cannot be viewed"
        scale = -step.lr * part.scale
        return [Target(tile.tensor, first + tile.first, tile.count, step.decay, scale) for tile in found]

    def _run_gathered(self, stage: Stage, steps: Steps, axis: AxisGroup) -> None:
        """Ranks of an axis hold parts: gather, orthogonalise the whole, and take the own part."""
        members = [index for index in stage.params if steps[index] is not None]
        if not members:
            return
        wholes = self._gather(members, steps, axis)
        for batch in stage.batches:
            self._orthogonalize_wholes(batch, wholes)
        for index in members:
            spec, step = self.plan.params[index], steps[index]
            assert step is not None
            assert spec.split is not None
            own = local_slice(wholes[index], spec.split, axis.index)
            step.weight.mul_(step.decay).view(own.shape).add_(own, alpha=-step.lr)

    def _orthogonalize_wholes(self, batch: FusedBatch, wholes: Mapping[int, torch.Tensor]) -> None:
        """Replace the matrices of gathered parameters by their scaled polar factors."""
        stacks, written = [], []
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if part.param in wholes]
            source = self._buffer("update", number, family, parts)
            result = self._buffer("result", number, family, parts)
            targets, first = [], 0
            for part in parts:
                spec, chosen = self.plan.params[part.param], slice(first, first + part.count)
                whole = _part(wholes[part.param], spec, part)
                _factored(source[chosen], spec, part).copy_(whole)
                targets.append(Target(result[chosen], first, part.count, 0.0, part.scale))
                written.append((whole, _factored(result[chosen], spec, part)))
                first += part.count
            stacks.append(Stack(source, tuple(targets), is_scratch=True))
        self._orthogonalize(batch, stacks)
        for whole, polar in written:
            whole.copy_(polar)

    def _gather(self, members: Sequence[int], steps: Steps, axis: AxisGroup) -> dict[int, torch.Tensor]:
        specs = self.plan.params
        local = sum(specs[index].local_numel for index in members)
        send = self._workspace.take("send", (local,))
        received = self._workspace.take("received", (axis.size * local,))
        pool = self._workspace.take("whole", (sum(specs[index].numel for index in members),))
        offset = 0
        for index in members:
            step, numel = steps[index], specs[index].local_numel
            assert step is not None
            self._write_update(
                send[offset : offset + numel].view(step.weight.shape), step.grad, step.momentum, step.beta
            )
            offset += numel
        # all-gather over the axis: each rank sends `local` float32 numbers once per stage
        all_gather(received, send, axis)
        wholes: dict[int, torch.Tensor] = {}
        shards, offset, start = received.view(axis.size, local), 0, 0
        for index in members:
            spec = specs[index]
            assert spec.split is not None
            wholes[index] = pool[start : start + spec.numel]
            fill_from_shards(wholes[index], shards[:, offset : offset + spec.local_numel], spec.split)
            offset, start = offset + spec.local_numel, start + spec.numel
        return wholes

    def _write_update(self, target: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, beta: float) -> None:
        """Momentum after the Nesterov look-ahead, in float32, without touching grad or momentum."""
        if not self._nesterov:
            target.copy_(momentum)
        elif grad.dtype is momentum.dtype is target.dtype:
            torch.lerp(momentum, grad, 1 - beta, out=target)
        else:
            target.copy_(momentum).mul_(beta).add_(grad, alpha=1 - beta)

    def _buffer(self, name: str, number: int, family: Family, parts: Sequence[PlannedPart]) -> torch.Tensor:
        shape = (sum(part.count for part in parts), family.rows, family.cols)
        return self._workspace.take(f"{name}{number}", shape)

    def _orthogonalize(self, batch: FusedBatch, stacks: Sequence[Stack]) -> None:
        self._engine(batch.algorithm)(stacks)
        self.num_orthogonalized += sum(stack.x.shape[0] for stack in stacks)

    def _engine(self, algorithm: Algorithm) -> NewtonSchulz:
        if algorithm not in self._engines:
            self._engines[algorithm] = NewtonSchulz(
                self.plan.coefficients, algorithm, device=self._device, workspace=self._workspace
            )
        return self._engines[algorithm]


def _part(tensor: torch.Tensor, spec: ParamSpec, part: PlannedPart) -> torch.Tensor:
    assert spec.view is not None
    return part_tensor(tensor, spec.view, spec.view.parts[part.part])


def _factored(slot: torch.Tensor, spec: ParamSpec, part: PlannedPart) -> torch.Tensor:
    assert spec.view is not None
    return slot_like(slot, spec.view, spec.view.parts[part.part])
