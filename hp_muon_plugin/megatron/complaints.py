"""Reasons of any rank against a step, which the all-reduce of the norms tells to all of them."""

import torch

from hp_muon_plugin.megatron.first_step import FirstStep, first_step_error
from hp_muon_plugin.megatron.missing import MissingGradients
from hp_muon_plugin.muon.gradients import missing_error, unfrozen_error
from hp_muon_plugin.muon.optimizer import HpMuonOptimizer


class Complaints:
    """What this rank has against a step.

    Args:
        inner: The optimizer, which knows what was frozen when it was built.
        missing: Notes gradients as they arrive, or None.
    """

    def __init__(self, inner: HpMuonOptimizer, missing: MissingGradients | None) -> None:
        self.first_step: FirstStep | None = None
        """Until the first step is over."""
        self._inner = inner
        self._missing = missing
        self._unfrozen: list[str] = []
        self._absent: torch.Tensor | None = None
        self._faults: list[str] = []

    def forget(self) -> None:
        """Begin a new step."""
        if self._missing is not None:
            self._missing.forget()

    def count(self, device: torch.device) -> torch.Tensor:
        """Look at the step whose gradients are reduced. Collective.

        Args:
            device: Where the counts are wanted.

        Returns:
            ``(3,)`` float32: parameters that were unfrozen, parameters without a gradient, faults of a first step.
        """
        self._unfrozen = self._inner.unfrozen()
        self._absent = None if self._missing is None else self._missing.find()
        self._faults = [] if self.first_step is None else self.first_step.faults()
        self.first_step = None
        counts = torch.tensor([float(len(self._unfrozen)), 0.0, float(len(self._faults))], device=device)
        if self._absent is not None:
            counts[1] = self._absent.sum()
        return counts

    def refuse(self, counts: tuple[int, ...]) -> None:
        """Raise what some rank has against the step; the same on every rank.

        Args:
            counts: Of all ranks together.

        Raises:
            GradientError: Naming the parameters.
            HookError: If the optimizer's chunks are not those that are trained.
        """
        num_unfrozen, num_missing, num_faults = counts
        if num_unfrozen:
            raise unfrozen_error(self._unfrozen)
        if num_missing and self._missing is not None and self._absent is not None:
            raise missing_error(self._missing.names(self._absent))
        if num_faults:
            raise first_step_error(self._faults)
