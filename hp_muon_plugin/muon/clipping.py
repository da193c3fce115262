"""Clipping by the global gradient norm, as Megatron clips."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.config.choices import ClipMode
from hp_muon_plugin.muon.routing import Algorithm

_NORM_EPS = 1e-6  # as in megatron-core's clip_grad_by_total_norm_fp32 and torch's clip_grad_norm_
_ROUNDING = 1e-5  # relative; a norm that was clipped before is known no better


@dataclass(frozen=True, slots=True)
class GradNorms:
    """Euclidean norms of the gradients of the whole model, before clipping.

    Attributes:
        total: Over all trainable parameters.
        muon: Over those that Muon updates.
        adamw: Over those that AdamW updates.
    """

    total: float
    muon: float
    adamw: float

    @classmethod
    def from_squares(cls, muon: float, adamw: float) -> "GradNorms":
        """Norms from sums of squares.

        Args:
            muon: Sum over Muon's gradients.
            adamw: Sum over AdamW's.

        Returns:
            The norms; all NaN if a sum is.
        """
        if not muon + adamw >= 0:
            return cls(math.nan, math.nan, math.nan)
        return cls(math.sqrt(muon + adamw), math.sqrt(muon), math.sqrt(adamw))

    @property
    def is_finite(self) -> bool:
        """Whether no gradient on any rank is NaN or infinite (or so large that its square is)."""
        return math.isfinite(self.total)


def clip_gradients(
    grads: Sequence[tuple[Algorithm, torch.Tensor]], norms: GradNorms, *, clip_grad: float, mode: ClipMode
) -> None:
    """Scale gradients in place so that their global norm is at most ``clip_grad``.

    Gradients whose norm is at most ``clip_grad`` already are left as they are, bit for bit: clipping
    again at the same or a larger norm changes nothing.

    Args:
        grads: Who updates a parameter, and its gradient on this rank.
        norms: Their finite norms over all ranks.
        clip_grad: Largest norm; 0 leaves everything as it is.
        mode: Which gradients are scaled, and whose norm counts.
    """
    if clip_grad <= 0 or mode == ClipMode.none:
        return
    is_adamw_only = mode == ClipMode.adamw_only
    norm = norms.adamw if is_adamw_only else norms.total
    chosen = [grad for algorithm, grad in grads if not is_adamw_only or algorithm is Algorithm.adamw]
    if chosen and norm > clip_grad * (1 + _ROUNDING):
        torch._foreach_mul_(chosen, clip_grad / (norm + _NORM_EPS))


def norms_of(grads: Sequence[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Norm of each gradient, in float32.

    Args:
        grads: Of any type, float64 too.
        norm_type: 2 or ``inf``.

    Returns:
        0-dim float32 tensors.
    """
    single = [grad.float() if grad.dtype is torch.float64 else grad for grad in grads]
    return list(torch._foreach_norm(single, norm_type, dtype=torch.float32)) if single else []
