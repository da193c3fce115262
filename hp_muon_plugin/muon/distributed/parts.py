"""A rank's parts of the shared parameters in one step: read for a message, changed by an update."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.executor import ParamStep
from hp_muon_plugin.muon.workspace import Workspace


@dataclass(slots=True)
class Parts:
    """What this rank holds of every parameter of a plan.

    Attributes:
        plan: The plan.
        rank: Place on its axis.
        steps: By parameter; its tensors are one-dimensional and hold the rank's stretch. None, or no entry, if
            the parameter is left alone in this step or the rank holds nothing of it.
        nesterov: Whether to look ahead.
        workspace: Buffers.
    """

    plan: SharePlan
    rank: int
    steps: Mapping[int, ParamStep | None]
    nesterov: bool
    workspace: Workspace

    def _step(self, item: Item) -> tuple[ParamStep, slice] | None:
        step = self.steps.get(item.param)
        low, high = item.span(self.rank)
        if step is None or low == high:
            return None
        first = item.start - self.plan.params[item.param].cuts[self.rank]
        return step, slice(first + low, first + high)

    def write(self, item: Item, target: torch.Tensor) -> None:
        """Write this rank's part of what Newton-Schulz reads: momentum, after the look-ahead.

        Args:
            item: The item.
            target: ``(held,)`` float32 or bfloat16; zeros for a parameter that is left alone.
        """
        found = self._step(item)
        if found is None:
            target.zero_()
            return
        step, where = found
        grad, momentum = step.grad[where], step.momentum[where]
        if not self.nesterov:
            target.copy_(momentum)
        elif grad.dtype is momentum.dtype is target.dtype:
            torch.lerp(momentum, grad, 1 - step.beta, out=target)
        else:
            whole = self.workspace.take("share_look_ahead", tuple(target.shape))
            target.copy_(whole.copy_(momentum).mul_(step.beta).add_(grad, alpha=1 - step.beta))

    def apply(self, item: Item, update: torch.Tensor) -> None:
        """Decay this rank's part of a weight and add its part of the update.

        Args:
            item: The item.
            update: ``(held,)`` the scaled polar factor.
        """
        found = self._step(item)
        if found is not None:
            step, where = found
            step.weight[where].mul_(step.decay).add_(update, alpha=-step.lr)

    def apply_product(self, item: Item, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
        """As :meth:`apply` with the update ``scale * left @ right``, which is not kept.

        Args:
            item: An item of one matrix, cut between rows.
            left: ``(rows held, k)`` float32.
            right: ``(k, cols)`` float32.
            scale: Factor.
        """
        found = self._step(item)
        if found is None:
            return
        step, where = found
        weight = step.weight[where].view(left.shape[0], right.shape[1])
        if weight.dtype is left.dtype:
            weight.addmm_(left, right, beta=step.decay, alpha=-step.lr * scale)
        else:
            weight.mul_(step.decay).add_(left @ right, alpha=-step.lr * scale)
