"""Running a plan on tensors, stage by stage."""

from collections.abc import Mapping

import torch

from hp_muon_plugin.muon.batches import FusedBatch, PlannedPart
from hp_muon_plugin.muon.gathered import run_gathered, run_owned
from hp_muon_plugin.muon.matrix_view import part_tensor, tiles
from hp_muon_plugin.muon.pieces import Piece, Way
from hp_muon_plugin.muon.plan import MuonPlan
from hp_muon_plugin.muon.stack import Stack, Target
from hp_muon_plugin.muon.stage_tools import ParamStep, StageTools, Steps, apply_updates
from hp_muon_plugin.muon.summed import run_summed
from hp_muon_plugin.muon.workspace import Workspace
from hp_muon_plugin.platform.collectives import AxisGroup
from hp_muon_plugin.platform.wire import C10dWire, Wire

__all__ = ["Executor", "ParamStep", "Steps"]

_WITH_AXIS = {Way.gather: run_gathered, Way.owner: run_owned, Way.gram: run_summed}


class Executor:
    """Runs the stages of a plan on this rank.

    Args:
        plan: The plan.
        axes: Mesh axes by name, at least those of the plan's stages.
        nesterov: Whether to look ahead.
        device: Where the parameters live.
        is_fused_by_lists: Whether whole parameters are read and updated by operations on lists of
            tensors, instead of one product per weight. None: on accelerators, where launches cost more
            than another pass over the update.
        workspace: Buffers to share with executors that run at other times. None: its own.
        wire: The network. None: torch.distributed.
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
        wire: Wire | None = None,
    ) -> None:
        self.plan = plan
        self._axes = axes
        self._is_fused_by_lists = device.type != "cpu" if is_fused_by_lists is None else is_fused_by_lists
        self._workspace = workspace or Workspace(device)
        self._tools = StageTools(
            plan, nesterov=nesterov, device=device, workspace=self._workspace, wire=wire or C10dWire()
        )

    @property
    def num_orthogonalized(self) -> int:
        """Matrices orthogonalised by this rank since construction, alone or with others."""
        return self._tools.num_orthogonalized

    @property
    def is_fused_by_lists(self) -> bool:
        """Whether weights are multiplied by their decay in a pass of their own, also where that is 0."""
        return self._is_fused_by_lists

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the reused buffers."""
        return self._workspace.nbytes

    def run(self, steps: Steps) -> None:
        """Update the weights of one step.

        Args:
            steps: One entry per parameter of the plan; None for a parameter that is left alone
                this step. The same entries are None on every rank of an axis that a stage runs over.
        """
        pieces = [_step_of(piece, steps[piece.param]) for piece in self.plan.pieces]
        for stage in self.plan.stages:
            if stage.axis is not None:
                _WITH_AXIS[stage.way](self._tools, stage, pieces, self._axes[stage.axis])
                continue
            for batch in stage.batches:
                self._run_lists(batch, pieces) if self._is_fused_by_lists else self._run_whole(batch, pieces)

    def _run_whole(self, batch: FusedBatch, steps: Steps) -> None:
        """Every rank holds the parameters whole: the last product updates the weights."""
        tools, stacks = self._tools, []
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if steps[part.piece] is not None]
            buffer = tools.buffer("update", number, family, parts)
            targets, first = [], 0
            for part in parts:
                step = steps[part.piece]
                assert step is not None
                slot = buffer[first : first + part.count]
                grad, momentum = tools.part(step.grad, part), tools.part(step.momentum, part)
                tools.write_update(tools.factored(slot, part), grad, momentum, step.beta)
                targets += self._weight_targets(step, part, first)
                first += part.count
            stacks.append(Stack(buffer, tuple(targets), is_scratch=True))
        tools.orthogonalize(batch, stacks)

    def _run_lists(self, batch: FusedBatch, steps: Steps) -> None:
        """As :meth:`_run_whole`, in a number of launches that does not grow with the parameters."""
        tools = self._tools
        stacks, weights, decays, updates, scales = [], [], [], [], []
        momenta, slots = [], []
        ahead: dict[float, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for number, family in enumerate(batch.families):
            parts = [part for part in family.parts if steps[part.piece] is not None]
            source = tools.buffer("update", number, family, parts)
            result = tools.buffer("result", number, family, parts)
            first = 0
            for part in parts:
                step = steps[part.piece]
                assert step is not None
                chosen = slice(first, first + part.count)
                slots.append(tools.factored(source[chosen], part))
                momenta.append(tools.part(step.momentum, part))
                ahead.setdefault(step.beta, []).append((slots[-1], tools.part(step.grad, part)))
                weights.append(tools.part(step.weight, part))
                decays.append(step.decay)
                updates.append(tools.factored(result[chosen], part))
                scales.append(-step.lr * part.scale)
                first += part.count
            stacks.append(Stack(source, (Target(result, 0, first),) if first else (), is_scratch=True))
        if not slots:
            return
        torch._foreach_copy_(slots, momenta)
        for beta, pairs in ahead.items() if tools.nesterov else ():
            torch._foreach_lerp_([slot for slot, _ in pairs], [grad.to(slot.dtype) for slot, grad in pairs], 1 - beta)
        tools.orthogonalize(batch, stacks)
        apply_updates(weights, decays, updates, scales)

    def _weight_targets(self, step: ParamStep, part: PlannedPart, first: int) -> list[Target]:
        spec = self._tools.spec(part.piece)
        assert spec.view is not None
        found = tiles(step.weight, spec.view, spec.view.parts[part.part])
        assert found is not None, f"{spec.name}: rows and columns of its matrices cannot be viewed"
        scale = -step.lr * part.scale
        return [Target(tile.tensor, first + tile.first, tile.count, step.decay, scale) for tile in found]


def _step_of(piece: Piece, step: ParamStep | None) -> ParamStep | None:
    """What a piece brings to a step: that of its parameter, or strided views of its part."""
    if step is None or piece.view is None or piece.part is None:
        return step
    part = piece.view.parts[piece.part]
    tensors = (step.weight, step.grad, step.momentum)
    weight, grad, momentum = (part_tensor(tensor, piece.view, part) for tensor in tensors)
    return ParamStep(weight, grad, momentum, step.decay, step.lr, step.beta)
