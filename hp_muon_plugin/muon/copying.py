"""Copies of an optimizer, as torch's optimizers can be copied, and groups that come too late."""

from collections.abc import Mapping
from typing import Any

import torch

from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.errors import ConfigError
from hp_muon_plugin.layout.spec import ParamSpec


class Copyable(torch.optim.Optimizer):
    """An optimizer whose parameters are fixed when it is built: from groups, specs and options, without ranks."""

    specs: Mapping[torch.nn.Parameter, ParamSpec]
    config: HpMuon
    skipped_steps: int
    _is_built = False

    @property
    def _is_of_several_ranks(self) -> bool:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Gives parameters another group; refuses those that the optimizer was not built with and has no plan of."""
        given = param_group["params"]
        param_group["params"] = params = [given] if isinstance(given, torch.Tensor) else list(given)
        unnamed = [param[1] if isinstance(param, tuple) else param for param in params]
        if self._is_built and any(param not in self.specs for param in unnamed):
            fix = "build the optimizer anew with all parameters, and give it this one's state_dict()"
            raise ConfigError("params", "add_param_group", "would add parameters without a route or a plan", fix)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """What ``copy.deepcopy`` and ``pickle`` keep."""
        if self._is_of_several_ranks:
            raise TypeError(
                "an optimizer of several ranks holds their process groups, which can't be copied\n"
                "  fix: build it anew, and give it this one's state_dict()"
            )
        kept = {"specs": self.specs, "config": self.config, "skipped_steps": self.skipped_steps}
        return super().__getstate__() | kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what torch calls when a state is loaded, with groups and state alone."""
        if "specs" in state:
            self.__init__(state["param_groups"], state["specs"], state["config"])  # type: ignore[misc]
            self.skipped_steps, self.state = state["skipped_steps"], state["state"]
        else:
            super().__setstate__(state)
