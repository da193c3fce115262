"""Running a plan on tensors: make whole, orthogonalise, apply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.matrix_view import fill_from_shards, local_slice, part_tensor, slot_like
from hp_muon_plugin.muon.newton_schulz import newton_schulz
from hp_muon_plugin.muon.plan import FusedBatch, MuonPlan, PlannedPart, Stage
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
    """

    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    decay: float
    lr: float


class Executor:
    """Runs the stages of a plan on this rank.

    Args:
        plan: The plan.
        axes: Mesh axes by name, at least those that the plan's stages gather over.
        momentum: Decay of the moving average, for the Nesterov look-ahead.
        nesterov: Whether to look ahead.
        ns_dtype: Type that Newton-Schulz iterates in.
        device: Where the parameters live.
    """

    def __init__(
        self,
        plan: MuonPlan,
        axes: Mapping[str, AxisGroup],
        *,
        momentum: float,
        nesterov: bool,
        ns_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._device = device
        self._axes = axes
        self._momentum = momentum
        self._nesterov = nesterov
        self._ns_dtype = ns_dtype
        self._workspace = Workspace()
        self.num_orthogonalized = 0
        """Matrices orthogonalised by this rank since construction."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the reused buffers."""
        return self._workspace.nbytes

    def run(self, steps: Sequence[ParamStep | None]) -> None:
        """Update the weights of one step.

        Args:
            steps: One entry per parameter of the plan; None for a parameter that is left alone
                this step. The same entries are None on every rank of an axis that is gathered over.
        """
        for stage in self.plan.stages:
            if stage.axis is None:
                self._run_whole(stage, steps)
            else:
                self._run_gathered(stage, steps, self._axes[stage.axis])

    def _run_whole(self, stage: Stage, steps: Sequence[ParamStep | None]) -> None:
        for batch in stage.batches:
            parts = [part for part in batch.parts if steps[part.param] is not None]
            slots = self._slots(batch, parts)
            for part, slot in zip(parts, slots, strict=True):
                spec, step = self.plan.params[part.param], steps[part.param]
                assert step is not None
                target = _factored(slot, spec, part)
                self._write_update(target, _part(step.grad, spec, part), _part(step.momentum, spec, part))
            for part, slot in zip(parts, self._orthogonalize(batch, parts), strict=True):
                spec, step = self.plan.params[part.param], steps[part.param]
                assert step is not None
                weight = _part(step.weight, spec, part)
                weight.mul_(step.decay).add_(_factored(slot, spec, part), alpha=-step.lr * part.scale)

    def _run_gathered(self, stage: Stage, steps: Sequence[ParamStep | None], axis: AxisGroup) -> None:
        members = [index for index in stage.params if steps[index] is not None]
        if not members:
            return
        wholes = self._gather(members, steps, axis)
        for batch in stage.batches:
            parts = [part for part in batch.parts if part.param in wholes]
            for part, slot in zip(parts, self._slots(batch, parts), strict=True):
                spec = self.plan.params[part.param]
                _factored(slot, spec, part).copy_(_part(wholes[part.param], spec, part))
            for part, slot in zip(parts, self._orthogonalize(batch, parts), strict=True):
                spec = self.plan.params[part.param]
                target = _part(wholes[part.param], spec, part)
                torch.mul(_factored(slot, spec, part), part.scale, out=target)
        for index in members:
            spec, step = self.plan.params[index], steps[index]
            assert step is not None
            assert spec.split is not None
            own = local_slice(wholes[index], spec.split, axis.index)
            step.weight.mul_(step.decay).view(own.shape).add_(own, alpha=-step.lr)

    def _gather(
        self, members: Sequence[int], steps: Sequence[ParamStep | None], axis: AxisGroup
    ) -> dict[int, torch.Tensor]:
        specs = self.plan.params
        local = sum(specs[index].local_numel for index in members)
        send = self._workspace.take("send", (local,), device=self._device)
        received = self._workspace.take("received", (axis.size * local,), device=self._device)
        whole_numel = sum(specs[index].numel for index in members)
        pool = self._workspace.take("whole", (whole_numel,), device=self._device)
        offset = 0
        for index in members:
            step, numel = steps[index], specs[index].local_numel
            assert step is not None
            own = send[offset : offset + numel].view(step.weight.shape)
            self._write_update(own, step.grad, step.momentum)
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

    def _write_update(self, target: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor) -> None:
        """Momentum after the Nesterov look-ahead, in float32, without touching grad or momentum."""
        target.copy_(momentum)
        if self._nesterov:
            target.mul_(self._momentum).add_(grad, alpha=1 - self._momentum)

    def _slots(self, batch: FusedBatch, parts: Sequence[PlannedPart]) -> list[torch.Tensor]:
        count = sum(part.count for part in parts)
        flat = self._workspace.take("batch", (count, batch.short, batch.long), device=self._device)
        return list(flat.split([part.count for part in parts])) if parts else []

    def _orthogonalize(self, batch: FusedBatch, parts: Sequence[PlannedPart]) -> list[torch.Tensor]:
        count = sum(part.count for part in parts)
        if not parts:
            return []
        flat = self._workspace.take("batch", (count, batch.short, batch.long), device=self._device)
        result = newton_schulz(flat.to(self._ns_dtype), self.plan.coefficients)
        self.num_orthogonalized += count
        return list(result.split([part.count for part in parts]))


def _part(tensor: torch.Tensor, spec: ParamSpec, part: PlannedPart) -> torch.Tensor:
    assert spec.view is not None
    return part_tensor(tensor, spec.view, spec.view.parts[part.part])


def _factored(slot: torch.Tensor, spec: ParamSpec, part: PlannedPart) -> torch.Tensor:
    assert spec.view is not None
    return slot_like(slot, spec.view, spec.view.parts[part.part], is_transposed=part.is_transposed)
