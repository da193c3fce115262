"""torch's AdamW as the baseline in plain PyTorch: no decay on vectors, and clipping by the global norm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.muon.clipping import norms_of
from hp_muon_plugin.muon.gradients import unfrozen_error, unfrozen_names
from hp_muon_plugin.platform.collectives import AxisGroup, all_reduce_sum


class BaselineAdamW(torch.optim.AdamW):
    """torch's AdamW, whose gradients are clipped in place before each step, without a word to the host.

    Args:
        groups: Groups as torch takes them.
        specs: Spec of every parameter of the model, for the routing table.
        config: Options.
        axes: For shards of ``hp_fully_shard``: axes over which parts of gradients lie, by name.
        summed: The axis of each shard.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        specs: Mapping[torch.nn.Parameter, ParamSpec],
        config: AdamW,
        *,
        axes: Mapping[str, AxisGroup] | None = None,
        summed: Mapping[torch.nn.Parameter, str] | None = None,
    ) -> None:
        beta1, beta2 = config.betas
        super().__init__(list(groups), lr=config.lr, betas=(beta1, beta2), eps=config.eps)
        self.config = config
        self.specs = dict(specs)
        self._axes, self._summed = dict(axes or {}), dict(summed or {})
        self.grad_norm_last: torch.Tensor | None = None
        """Norm of the last step's gradients before clipping, a scalar on the device."""
        self.register_step_pre_hook(_clip_first)

    def clip(self) -> None:
        """Scale gradients so that their global norm is at most ``clip_grad``; 0 leaves them as they are."""
        if self.config.clip_grad > 0:
            params = [p for group in self.param_groups for p in group["params"]]
            if not self._axes:
                self.grad_norm_last = torch.nn.utils.clip_grad_norm_(params, self.config.clip_grad)
                return
            self.grad_norm_last = self._norm_of_shards(params)
            torch.nn.utils.clip_grads_with_norm_(params, self.config.clip_grad, self.grad_norm_last)

    def _norm_of_shards(self, params: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Norm of the whole model's gradients, of which this rank has parts. All ranks must call it."""
        grads: dict[str, list[torch.Tensor]] = {name: [] for name in self._axes}
        for param in params:
            if param.grad is not None and param.grad.numel():
                grads[self._summed[param]].append(param.grad)
        device = params[0].device if params else torch.device("cpu")
        total = torch.zeros((), device=device)
        for name, axis in self._axes.items():
            norms = norms_of(grads[name])
            square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
            all_reduce_sum(square, axis)  # 4 bytes; the host does not wait
            total = total + square
        return total.sqrt()


def _clip_first(optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """A closure makes the gradients, so where there is one, clipping goes behind it."""
    unfrozen = unfrozen_names(optimizer.specs)
    if unfrozen:
        raise unfrozen_error(unfrozen)
    names = ("self", "closure")
    given = dict(zip(names, arguments, strict=False)) | keywords
    closure: Callable[[], Any] | None = given.get("closure")
    if closure is None:
        optimizer.clip()
        return None

    def then_clip() -> Any:
        loss = closure()
        with torch.no_grad():
            optimizer.clip()
        return loss

    return (optimizer,), {"closure": then_clip}
