"""Keeping squares inside float32: exact scaling by powers of two.

Squares of entries below 1e-19 vanish and sums of squares of entries above 1e19 overflow. Scaling a
matrix by a power of two changes no bit of its mantissas and, because the polar factor does not
depend on the size of the matrix, nothing of the result.
"""

import math
from collections.abc import Sequence

import torch

from hp_muon_plugin.errors import GradientError

# Squared norms outside this range mean that squares of entries may have lost bits.
_SMALLEST_TRACE = 1e-24
_LARGEST_TRACE = 1e30
_READ_ONE_BY_ONE = 64  # up to here a list costs less than two reductions
_EXPONENT_BITS = 0x7F800000
_SMALLEST_POWER = 2.0**-126


def is_in_range(trace: torch.Tensor) -> bool:
    """Whether Gram matrices with these traces are exact enough.

    Only for the CPU, where reading the traces costs nothing and the answer is almost always yes. On a
    device it would make the host wait; there matrices are always scaled.

    Args:
        trace: ``(B,)`` float32.

    Returns:
        True if all squared norms lie in the safe range. NaN is out of range.
    """
    if trace.numel() > _READ_ONE_BY_ONE:
        low, high = trace.aminmax()
        return float(low) >= _SMALLEST_TRACE and float(high) <= _LARGEST_TRACE
    return all(_SMALLEST_TRACE <= value <= _LARGEST_TRACE for value in trace.tolist())


def largest_entry(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of every matrix.

    Args:
        x: ``(B, M, N)`` float32, any strides.

    Returns:
        ``(B, 1, 1)`` float32; NaN where a matrix has a NaN.
    """
    found: torch.Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=(-2, -1), keepdim=True)
    return found


def scaled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Matrices whose largest entries lie in [1, 2), scaled exactly, matrix by matrix.

    Four kernels, and nothing is read by the host: the power of two is the exponent of the largest
    entry, taken from its bits. A zero matrix stays zero. NaN and infinity give NaN in their own
    matrix.

    Args:
        x: ``(B, M, N)`` float32, any strides.
        out: Receives the result; may be ``x``.

    Returns:
        ``out``.
    """
    return divide_by_power(x, exponent_bits(x), out)


def exponent_bits(x: torch.Tensor) -> torch.Tensor:
    """The power of two below the largest entry of every matrix, as the bits of a float32.

    Args:
        x: ``(B, M, N)`` float32, any strides.

    Returns:
        ``(B, 1, 1)`` int32; larger for larger entries, and largest where one is infinite or NaN.
    """
    return largest_entry(x).view(torch.int32).bitwise_and(_EXPONENT_BITS)


def divide_by_power(x: torch.Tensor, bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Divide every matrix by a power of two, exactly.

    Args:
        x: ``(B, M, N)`` float32, any strides.
        bits: ``(B, 1, 1)`` from :func:`exponent_bits`.
        out: Receives the result; may be ``x``.

    Returns:
        ``out``.
    """
    return torch.div(x, bits.view(torch.float32).clamp(min=_SMALLEST_POWER), out=out)


def scaled_half(x: torch.Tensor, out: torch.Tensor) -> None:
    """Exactly scaled matrices in half precision whose Gram matrices stay in range.

    The largest entries end up near ``2^-k`` with ``4^k`` about the long side, so that sums of that
    many squares are near 1 and neither overflow nor vanish in float16.

    Args:
        x: ``(B, M, N)``, any floating type and strides; not changed.
        out: ``(B, M, N)`` float16 or bfloat16.
    """
    power = exponent_bits(x.float()).view(torch.float32)
    halvings = math.ceil(math.log2(max(x.shape[1:])) / 2)
    # two divisions: the second keeps the product of the divisors inside float32
    out.copy_(torch.div(x, power.clamp(min=_SMALLEST_POWER)).mul_(2.0**-halvings))


def refuse_non_finite(xs: Sequence[torch.Tensor]) -> None:
    """Refuse matrices with a NaN or infinite entry. The host waits for the device.

    Args:
        xs: Each ``(B_i, M_i, N_i)``.

    Raises:
        GradientError: If there is one, with its number among all matrices.
    """
    flags = [largest_entry(x.float()).isfinite().flatten() for x in xs]
    bad = torch.cat(flags).logical_not_().nonzero().flatten().tolist()  # read by the host
    if bad:
        raise GradientError(
            f"matrices {bad[:8]} of {sum(flag.numel() for flag in flags)}: NaN or infinite entry "
            "(non_finite=error); nothing was written\n"
            "  fix: look at where these gradients come from, or use non_finite=skip"
        )
