"""Reading the matrices of a chunk: in place where they may be, else as copies in the workspace."""

from collections.abc import Sequence

import torch

from hp_muon_plugin.config.choices import NonFinite
from hp_muon_plugin.muon.scaling import largest_entry, scaled, scaled_half
from hp_muon_plugin.muon.stack import Stack
from hp_muon_plugin.muon.workspace import Workspace


class Inputs:
    """What stands between the caller's matrices and the products.

    Args:
        workspace: Where copies go.
        dtype: Type of the products.
        non_finite: See :class:`hp_muon_plugin.muon.newton_schulz.NewtonSchulz`.
        always_scales: See there.
    """

    def __init__(
        self, workspace: Workspace, dtype: torch.dtype, non_finite: NonFinite | None, *, always_scales: bool
    ) -> None:
        self._workspace = workspace
        self._dtype = dtype
        self._non_finite = non_finite
        self._always_scales = always_scales
        self.are_scaled = always_scales or dtype is torch.float16
        """Whether everything read is in range without a look at its squares."""
        self.num_non_finite = torch.zeros((), dtype=torch.int64, device=workspace.device)
        """Matrices left out so far."""

    def read(self, chunk: Sequence[Stack], *, are_turned: bool = False) -> list[torch.Tensor]:
        """The matrices in the type of the products, and in range if they always are.

        Args:
            chunk: Stacks.
            are_turned: Whether tall matrices are copied as wide ones.

        Returns:
            ``(B, M, N)`` of each, or ``(B, N, M)``; the caller's own tensors if they may be.
        """
        found = []
        for position, stack in enumerate(chunk):
            x, is_turned = stack.x, are_turned and stack.x.shape[1] > stack.x.shape[2]
            found.append(self._copied(x.mT if is_turned else x, stack, position, is_turned=is_turned))
        return found

    def rescaled(self, current: Sequence[torch.Tensor], chunk: Sequence[Stack]) -> list[torch.Tensor]:
        """Matrices whose squares left the range, in range.

        Args:
            current: What :meth:`read` returned, gathered or not.
            chunk: What it was read from.

        Returns:
            Scaled copies; in place where that changes no input.
        """
        kept = {stack.x.data_ptr() for stack in chunk if not stack.is_scratch}
        return [
            self._scaled(self._cleaned(x, position), position, is_kept=x.data_ptr() in kept)
            for position, x in enumerate(current)
        ]

    def _copied(self, x: torch.Tensor, stack: Stack, position: int, *, is_turned: bool) -> torch.Tensor:
        if self.are_scaled and self._dtype is not torch.float32:
            copy = self._workspace.take(f"copied.{position}", tuple(x.shape), self._dtype)
            scaled_half(self._cleaned(x, position), copy)
            return copy
        if x.dtype is not self._dtype or is_turned:
            x = self._workspace.take(f"copied.{position}", tuple(x.shape), self._dtype).copy_(x)
        if not self._always_scales:
            return x
        x = self._cleaned(x, position)
        return self._scaled(x, position, is_kept=x is stack.x and not stack.is_scratch)

    def _scaled(self, x: torch.Tensor, position: int, *, is_kept: bool) -> torch.Tensor:
        out = self._workspace.take(f"scaled.{position}", tuple(x.shape), self._dtype) if is_kept else x
        if self._dtype is torch.float32:
            return scaled(x, out)
        wide = x.float()  # rare: its allocation is no matter
        return out.copy_(scaled(wide, wide))

    def _cleaned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """With ``non_finite=skip``: a copy in which bad matrices are zero, and counted."""
        if self._non_finite is not NonFinite.skip:
            return x
        is_bad = largest_entry(x.float()).isfinite().logical_not_()
        self.num_non_finite.add_(is_bad.sum())
        copy = self._workspace.take(f"cleaned.{position}", tuple(x.shape), x.dtype)
        return copy.copy_(x).masked_fill_(is_bad, 0.0)
