"""Parameters that no rank used, which get no gradient: told by the sign of zero, in sums that are sent anyway.

Where a rank did not use a parameter, its whole gradient is minus zero. A sum of minus zeros is minus zero, and with
anything else it is that: so after the reductions minus zero is left where no rank used the parameter, and nowhere else.
Gradients that were computed are added to plus zero, which no addition turns into minus zero. A rank that used a
parameter itself need not look; so where all are used, nothing is looked at, and no rank takes part in anything more.

A backend whose sums forget the sign of zero gives a gradient of zeros on all ranks, as where some rank used it.
"""

from collections.abc import Sequence

import torch

_MARK = -0.0


def mark(grads: Sequence[torch.Tensor]) -> None:
    """Say that this rank did not use some parameters.

    Args:
        grads: Their whole gradients on this rank, before they are reduced.
    """
    for grad in grads:
        grad.fill_(_MARK)


def unmark_rounded(flat: torch.Tensor) -> None:
    """Make plus zeros of values that a division has rounded to minus zero, before :func:`mark`.

    Args:
        flat: Whole gradients.
    """
    flat.add_(0.0)


def are_unused(sums: Sequence[torch.Tensor]) -> list[bool]:
    """Whether no rank used parameters which this rank did not use. The host waits, for all of them at once.

    Args:
        sums: This rank's parts of their gradients, summed over all ranks and not yet divided; not empty.

    Returns:
        An answer for each, the same on all ranks that hold a part.
    """
    if not sums:
        return []
    every = torch.stack([((part == 0) & torch.signbit(part)).all() for part in sums])
    return [bool(answer) for answer in every.tolist()]
