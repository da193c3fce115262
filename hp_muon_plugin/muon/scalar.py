"""AdamW for the parameters that Muon does not take: torch's own, sharing our groups and state."""

from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.platform.untraced import untraced


def adamw_defaults(config: HpMuon) -> dict[str, Any]:
    """Group entries of AdamW, in torch's names.

    Args:
        config: Options; ``adamw.lr`` and ``adamw.weight_decay`` fall back to Muon's.

    Returns:
        ``lr``, ``betas``, ``eps`` and ``weight_decay``.
    """
    scalar = config.adamw
    beta1, beta2 = scalar.betas
    return {
        "lr": config.lr if scalar.lr is None else scalar.lr,
        "betas": (beta1, beta2),
        "eps": scalar.eps,
        "weight_decay": config.weight_decay if scalar.weight_decay is None else scalar.weight_decay,
    }


class SharedAdamW:
    """``torch.optim.AdamW`` over some groups of another optimizer.

    It works on the other optimizer's group dictionaries and state, so that schedulers, checkpoints
    and users see one optimizer with one state.
    """

    def __init__(self) -> None:
        self._inner: torch.optim.AdamW | None = None

    def complete(self, group: dict[str, Any]) -> None:
        """Add the entries that torch's AdamW expects in a group, where they are missing.

        Args:
            group: Changed in place.
        """
        inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        for key, value in inner.defaults.items():
            group.setdefault(key, value)

    @untraced  # traced, it would take the groups that it was built with, and update nothing
    def step(self, groups: list[dict[str, Any]], state: Any) -> None:
        """One AdamW step.

        Args:
            groups: Groups whose parameters are updated; parameters without gradient are left alone.
            state: The owning optimizer's state, updated in place.
        """
        if not any(group["params"] for group in groups):
            return
        if self._inner is None:
            self._inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        self._inner.param_groups = groups
        self._inner.state = state
        self._inner.step()
