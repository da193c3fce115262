"""A rank's parts of the shared parameters in one step: read for a message, changed by an update."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hp_muon_plugin.muon.distributed.items import Item
from hp_muon_plugin.muon.distributed.plan import SharePlan
from hp_muon_plugin.muon.distributed.stripes import Run
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
        is_ahead: Whether the step has not begun, and ``steps`` are of one batch only.
    """

    plan: SharePlan
    rank: int
    steps: Mapping[int, ParamStep | None]
    nesterov: bool
    workspace: Workspace
    is_ahead: bool = False

    def _found(self, item: Item) -> tuple[ParamStep, list[Run]] | None:
        """The step of an item's parameter, and where this rank's part of the item lies in its tensors."""
        step = self.steps.get(item.param)
        low, high = item.span(self.rank)
        if step is None or low == high:
            return None
        first = item.start - self.plan.params[item.param].cuts[self.rank]
        return step, [replace(run, first=run.first - low, start=first + run.start) for run in item.runs(low, high)]

    def write(self, item: Item, target: torch.Tensor) -> None:
        """Write this rank's part of what Newton-Schulz reads: momentum, after the look-ahead.

        Args:
            item: The item.
            target: ``(held,)`` float32 or bfloat16; zeros for a parameter that is left alone.
        """
        found = self._found(item)
        if found is None:
            target.zero_()
            return
        step, runs = found
        for run in runs:
            out, grad, momentum = _of_item(target, run), in_param(step.grad, run), in_param(step.momentum, run)
            if not self.nesterov:
                out.copy_(momentum)
            elif grad.dtype is momentum.dtype is out.dtype:
                torch.lerp(momentum, grad, 1 - step.beta, out=out)
            else:
                whole = _of_item(self.workspace.take("share_look_ahead", tuple(target.shape)), run)
                out.copy_(whole.copy_(momentum).mul_(step.beta).add_(grad, alpha=1 - step.beta))

    def apply(self, item: Item, update: torch.Tensor) -> None:
        """Decay this rank's part of a weight and add its part of the update.

        Args:
            item: The item.
            update: ``(held,)`` the scaled polar factor.
        """
        step, runs = self._found(item) or (None, [])
        for run in runs:
            assert step is not None
            in_param(step.weight, run).mul_(step.decay).add_(_of_item(update, run), alpha=-step.lr)

    def apply_product(self, item: Item, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
        """As :meth:`apply` with the update ``scale * left @ right``, which is not kept.

        Args:
            item: An item of one matrix, cut between rows.
            left: ``(rows held, k)`` float32.
            right: ``(k, cols)`` float32.
            scale: Factor.
        """
        step, runs = self._found(item) or (None, [])
        cols = right.shape[1]
        for run in runs:
            assert step is not None
            weight = in_param(step.weight, run).view(run.times, run.length // cols, cols)
            rows = left[run.first // cols : (run.first + run.numel) // cols].view(*weight.shape[:2], -1)
            if weight.dtype is not left.dtype:
                weight.mul_(step.decay).add_(rows @ right, alpha=-step.lr * scale)
            elif run.times == 1:
                weight[0].addmm_(rows[0], right, beta=step.decay, alpha=-step.lr * scale)
            else:
                every = right.expand(run.times, *right.shape)
                weight.baddbmm_(rows, every, beta=step.decay, alpha=-step.lr * scale)


def in_param(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """Some elements of a parameter.

    Args:
        tensor: One-dimensional and contiguous.
        run: Where they lie in it.

    Returns:
        ``(times, length)``, a view.
    """
    return tensor.as_strided((run.times, run.length), (run.step, 1), tensor.storage_offset() + run.start)


def _of_item(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """The same elements where an item's stand one after another."""
    return tensor[run.first : run.first + run.numel].view(run.times, run.length)
