"""What the stages of a step share: buffers, the look-ahead, the iteration, the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.algorithm import Algorithm
from hp_muon_plugin.muon.batches import Family, FusedBatch, PlannedPart
from hp_muon_plugin.muon.matrix_view import part_tensor, slot_like
from hp_muon_plugin.muon.newton_schulz import NewtonSchulz
from hp_muon_plugin.muon.plan import MuonPlan
from hp_muon_plugin.muon.stack import Stack, Target
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.spans import NEWTON_SCHULZ, span
from hp_muon_plugin.platform.wire import Wire


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


class StageTools:
    """Shared by all stages of one executor.

    Args:
        plan: The plan.
        nesterov: Whether to look ahead.
        device: Where the parameters live.
        workspace: Buffers.
        wire: The network.
    """

    def __init__(
        self, plan: MuonPlan, *, nesterov: bool, device: torch.device, workspace: Workspace, wire: Wire
    ) -> None:
        self.plan = plan
        self.nesterov = nesterov
        self.device = device
        self.workspace = workspace
        self.wire = wire
        self.num_orthogonalized = 0
        """Matrices orthogonalised by this rank, alone or with others."""
        self._engines: dict[Algorithm, NewtonSchulz] = {}

    def spec(self, index: int) -> ParamSpec:
        """What stages see of a piece.

        Args:
            index: Its number.

        Returns:
            Its spec.
        """
        return self.plan.pieces[index].spec

    def part(self, tensor: torch.Tensor, part: PlannedPart) -> torch.Tensor:
        """The elements of a planned part in a tensor of its piece, in batch, rows, cols order.

        Args:
            tensor: Of the piece.
            part: One of its parts.

        Returns:
            A view.
        """
        view = self.spec(part.piece).view
        assert view is not None
        return part_tensor(tensor, view, view.parts[part.part])

    def factored(self, slot: torch.Tensor, part: PlannedPart) -> torch.Tensor:
        """A workspace slot in the dims of :meth:`part`.

        Args:
            slot: ``(count, rows, cols)``, contiguous.
            part: The part.

        Returns:
            A view.
        """
        view = self.spec(part.piece).view
        assert view is not None
        return slot_like(slot, view, view.parts[part.part])

    def write_update(self, target: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, beta: float) -> None:
        """Momentum after the Nesterov look-ahead, in float32, without touching grad or momentum.

        Args:
            target: Receives it.
            grad: The gradient.
            momentum: The moving average.
            beta: Its decay.
        """
        if not self.nesterov:
            target.copy_(momentum)
        elif grad.dtype is momentum.dtype is target.dtype:
            torch.lerp(momentum, grad, 1 - beta, out=target)
        else:
            target.copy_(momentum).mul_(beta).add_(grad, alpha=1 - beta)

    def pack_updates(self, send: torch.Tensor, members: Sequence[int], steps: Steps) -> None:
        """Look-ahead momenta of this rank's elements, one piece after another.

        Args:
            send: ``(sum of local_numel,)`` float32.
            members: Pieces.
            steps: Of all pieces.
        """
        offset = 0
        for index in members:
            step, numel = steps[index], self.spec(index).local_numel
            assert step is not None
            target = send[offset : offset + numel].view(step.weight.shape)
            self.write_update(target, step.grad, step.momentum, step.beta)
            offset += numel

    def buffer(self, name: str, number: int, family: Family, parts: Sequence[PlannedPart]) -> torch.Tensor:
        """A workspace buffer for matrices of one shape.

        Args:
            name: Which buffer.
            number: Of the family, or whatever tells it from others that live at the same time.
            family: Their shape.
            parts: Those of its parts that take part.

        Returns:
            ``(count, rows, cols)`` float32.
        """
        shape = (sum(part.count for part in parts), family.rows, family.cols)
        return self.workspace.take(f"{name}{number}", shape)

    def orthogonalize(self, batch: FusedBatch, stacks: Sequence[Stack]) -> None:
        """Run the iteration of a batch.

        Args:
            batch: The batch.
            stacks: Its matrices.
        """
        with span(NEWTON_SCHULZ):
            self.engine(batch.algorithm)(stacks)
        self.num_orthogonalized += sum(stack.x.shape[0] for stack in stacks)

    def engine(self, algorithm: Algorithm) -> NewtonSchulz:
        """The iteration for an algorithm.

        Args:
            algorithm: The algorithm.

        Returns:
            One object per algorithm.
        """
        if algorithm not in self._engines:
            self._engines[algorithm] = NewtonSchulz(
                self.plan.coefficients, algorithm, device=self.device, workspace=self.workspace
            )
        return self._engines[algorithm]

    def orthogonalize_wholes(self, batch: FusedBatch, wholes: Mapping[int, torch.Tensor]) -> None:
        """Replace the matrices of whole pieces by their scaled polar factors.

        Args:
            batch: A batch.
            wholes: Whole pieces by number, contiguous float32; pieces of the batch that are missing are
                left out.
        """
        stacks, written = [], []
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if part.piece in wholes]
            source = self.buffer("update", number, family, parts)
            result = self.buffer("result", number, family, parts)
            targets, first = [], 0
            for part in parts:
                chosen = slice(first, first + part.count)
                whole = self.part(wholes[part.piece], part)
                self.factored(source[chosen], part).copy_(whole)
                targets.append(Target(result[chosen], first, part.count, 0.0, part.scale))
                written.append((whole, self.factored(result[chosen], part)))
                first += part.count
            stacks.append(Stack(source, tuple(targets), is_scratch=True))
        self.orthogonalize(batch, stacks)
        for whole, polar in written:
            whole.copy_(polar)


def apply_update(step: ParamStep, update: torch.Tensor) -> None:
    """``weight <- decay * weight - lr * update``.

    Args:
        step: The piece's step.
        update: As many elements in the same order, with dims of size 1 more or less.
    """
    step.weight.mul_(step.decay).view(update.shape).add_(update, alpha=-step.lr)


def apply_updates(
    weights: list[torch.Tensor], decays: list[float], updates: list[torch.Tensor], factors: list[float]
) -> None:
    """``weight <- decay * weight + factor * update`` for lists; the updates are used up.

    Factors of half-precision lists may be rounded to their type where no fused kernel takes them: a decay
    of 0.9995 would be none. So these weights are updated one by one.

    Args:
        weights: Any floating types.
        decays: By weight.
        updates: Of the same shapes, float32.
        factors: By weight.
    """
    torch._foreach_mul_(updates, factors)
    if all(weight.dtype is torch.float32 for weight in weights):
        torch._foreach_mul_(weights, decays)
        torch._foreach_add_(weights, updates)
        return
    for weight, decay, update in zip(weights, decays, updates, strict=True):
        weight.mul_(decay).add_(update)
