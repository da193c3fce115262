"""Newton-Schulz: the polar factor of a batch of matrices by matrix products alone.

The quintic iteration of Keller Jordan's Muon (2024): with ``A = X X^T``, one step is
``X <- a X + (b A + c A A) X``, started from ``X / ||X||_F``.
"""

from collections.abc import Sequence

import torch

from hp_muon_plugin.muon.coefficients import Coefficients


def normalize_(batch: torch.Tensor) -> torch.Tensor:
    """Divide every matrix by its Frobenius norm, whatever the size of its entries, in place.

    The entries are first scaled by an exact power of two, so that neither huge nor tiny matrices
    overflow or vanish when squared. A zero matrix stays zero; NaN and infinity stay in their own
    matrix. Nothing is read back to the host.

    Args:
        batch: ``(B, M, N)``, floating point, changed in place.

    Returns:
        ``batch``.
    """
    if batch.numel() == 0:
        return batch
    largest = batch.abs().amax(dim=(-2, -1), keepdim=True)  # (B, 1, 1)
    _, exponent = torch.frexp(largest.float())
    # Two halves, because 2^-exponent alone overflows float32 for the smallest subnormal numbers.
    half = exponent.div(2, rounding_mode="floor")
    one = torch.ones_like(largest)
    batch.mul_(torch.ldexp(one, -half)).mul_(torch.ldexp(one, half - exponent))
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    batch.div_(torch.where(norm > 0, norm, torch.ones_like(norm)).to(batch.dtype))
    return batch


def newton_schulz(batch: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """Approximate polar factors of a batch of matrices.

    Args:
        batch: ``(B, M, N)`` with ``M <= N``, float32, bfloat16 or float16; used as scratch.
        coefficients: ``(a, b, c)`` of every step.

    Returns:
        ``(B, M, N)`` of the same dtype, contiguous: for ``X = U S V^T`` about ``U V^T``. A zero
        matrix gives zero.
    """
    assert batch.dim() == 3, batch.shape
    assert batch.shape[1] <= batch.shape[2], batch.shape
    if batch.numel() == 0:
        return batch
    current, other = normalize_(batch), torch.empty_like(batch)
    count, short, _ = batch.shape
    gram = batch.new_empty(count, short, short)
    polynomial = torch.empty_like(gram)
    for a, b, c in coefficients:
        torch.bmm(current, current.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(current, polynomial, current, beta=a, out=other)
        current, other = other, current
    return current
