"""The single-process oracle: Muon and AdamW in float64, one matrix at a time, nothing clever.

Every strategy and every fast path of this package is tested against these functions. They are
slow and share no code with what they check, apart from the coefficient tables, the scale formulas, and the *views* that
say which elements of a weight are a matrix: tests/lane compares those with what megatron-core's forward reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.config.choices import ScaleMode
from hp_muon_plugin.layout.spec import MatrixView
from hp_muon_plugin.muon.coefficients import Coefficients
from hp_muon_plugin.muon.scale import update_scale


def reference_newton_schulz(matrix: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """The quintic iteration in float64.

    Args:
        matrix: ``(M, N)``, any dtype; not changed.
        coefficients: ``(a, b, c)`` of every step.

    Returns:
        ``(M, N)`` float64.
    """
    x: torch.Tensor = matrix.double()
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    if x.numel() == 0 or largest == 0:
        return torch.zeros_like(x)
    x = x / largest
    x = x / torch.linalg.matrix_norm(x)
    if x.shape[0] > x.shape[1]:
        tall: torch.Tensor = reference_newton_schulz(matrix.mT, coefficients).mT.contiguous()
        return tall
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def reference_update(
    update: torch.Tensor,
    view: MatrixView,
    coefficients: Sequence[Coefficients],
    *,
    scale: ScaleMode,
    factor: float = 1.0,
) -> torch.Tensor:
    """Scaled orthogonal update of one whole parameter, every matrix in it by itself.

    Args:
        update: Momentum (after Nesterov) of the whole parameter, any dtype.
        view: How the parameter reads as matrices.
        coefficients: ``(a, b, c)`` of every step.
        scale: Scale mode.
        factor: Extra factor.

    Returns:
        Tensor of the shape of ``update``, float64; the weight changes by ``-lr`` times it.
    """
    result = torch.zeros(view.factors, dtype=torch.float64)
    source = update.double().reshape(view.factors)
    for part in view.parts:
        count, rows, cols = view.part_shape(part)
        chosen = source.narrow(*part.narrow) if part.narrow else source
        target = result.narrow(*part.narrow) if part.narrow else result
        order = (*part.batch, *part.rows, *part.cols)
        chosen, target = chosen.permute(order), target.permute(order)
        matrices = chosen.reshape(count, rows, cols)
        done = [reference_newton_schulz(matrix, coefficients) for matrix in matrices]
        target.copy_(torch.stack(done).reshape(target.shape))
    # Every part has its own logical shape, so the scale is applied part by part.
    for part in view.parts:
        _, rows, cols = view.part_shape(part)
        target = result.narrow(*part.narrow) if part.narrow else result
        target.mul_(update_scale(scale, rows, cols, factor=factor))
    return result.reshape(update.shape)


@dataclass(slots=True)
class ReferenceMuon:
    """Muon on one whole parameter in float64, with the state it keeps between steps.

    Attributes:
        view: How the parameter reads as matrices.
        coefficients: Newton-Schulz coefficients.
        momentum: Decay of the moving average.
        nesterov: Whether the update looks ahead.
        scale: Scale mode.
        factor: Extra factor.
        buffer: Momentum, float64; None before the first step.
    """

    view: MatrixView
    coefficients: Sequence[Coefficients]
    momentum: float = 0.95
    nesterov: bool = True
    scale: ScaleMode = ScaleMode.match_rms_adamw
    factor: float = 1.0
    buffer: torch.Tensor | None = None

    def step(self, weight: torch.Tensor, grad: torch.Tensor, *, lr: float, weight_decay: float) -> torch.Tensor:
        """One step.

        Args:
            weight: The whole parameter, any dtype; not changed.
            grad: Its whole gradient.
            lr: Learning rate.
            weight_decay: Decoupled weight decay.

        Returns:
            The new weight, float64.
        """
        grad = grad.double()
        if self.buffer is None:
            self.buffer = torch.zeros_like(grad)
        self.buffer = self.momentum * self.buffer + (1 - self.momentum) * grad
        update = self.momentum * self.buffer + (1 - self.momentum) * grad if self.nesterov else self.buffer
        step = reference_update(update, self.view, self.coefficients, scale=self.scale, factor=self.factor)
        return weight.double() * (1 - lr * weight_decay) - lr * step


@dataclass(slots=True)
class ReferenceAdamW:
    """AdamW (Loshchilov and Hutter 2019, with bias correction) on one parameter in float64.

    Attributes:
        betas: Decay rates.
        eps: Added to the root of the second moment.
        first: First moment; None before the first step.
        second: Second moment.
        count: Steps done.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    count: int = 0

    def step(self, weight: torch.Tensor, grad: torch.Tensor, *, lr: float, weight_decay: float) -> torch.Tensor:
        """One step; arguments and result as in :meth:`ReferenceMuon.step`."""
        grad, (beta1, beta2) = grad.double(), self.betas
        self.count += 1
        first = torch.zeros_like(grad) if self.first is None else self.first
        second = torch.zeros_like(grad) if self.second is None else self.second
        self.first = beta1 * first + (1 - beta1) * grad
        self.second = beta2 * second + (1 - beta2) * grad * grad
        corrected = self.first / (1 - beta1**self.count)
        root = (self.second / (1 - beta2**self.count)).sqrt() + self.eps
        return weight.double() * (1 - lr * weight_decay) - lr * corrected / root
