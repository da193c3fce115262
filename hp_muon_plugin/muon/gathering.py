"""Separate small matrices of one shape, worked on as one tensor.

Every product of a separate matrix is a call of its own, and with several threads they all wait for each
other after it. Where copying costs less than that (:func:`hp_muon_plugin.muon.algorithm.is_gathered`),
neighbours are copied into one tensor first and their results out of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hp_muon_plugin.muon.stack import Stack


@dataclass(frozen=True, slots=True)
class Place:
    """Where neighbouring stacks of one shape become one.

    Attributes:
        count: Stacks.
        whole: ``(B, M, N)``, receives them; None for one stack that is read where it is.
        factors: Of the last product of all of them.
        result: ``(B, M, N)``, may receive the last product.
        results: The part of each stack in it.
    """

    count: int = 1
    whole: torch.Tensor | None = None
    factors: tuple[torch.Tensor, torch.Tensor] | None = None
    result: torch.Tensor | None = None
    results: tuple[torch.Tensor, ...] = ()


def gathered(xs: list[torch.Tensor], places: Sequence[Place]) -> list[torch.Tensor]:
    """Copy stacks into their places.

    Args:
        xs: Matrices of each stack.
        places: They take all stacks, in order.

    Returns:
        One tensor per place.
    """
    first, found = 0, []
    for place in places:
        members = xs[first : first + place.count]
        first += place.count
        if place.whole is None or (place.count == 1 and members[0].is_contiguous()):
            found.append(members[0])
        else:
            found.append(torch.cat(members, out=place.whole))
    return found


def is_returned(place: Place, members: Sequence[Stack]) -> bool:
    """Write the results of the stacks of a place by one product and copies, if they only overwrite.

    An update stays in the product of its own matrix, which saves a pass over the weight.

    Args:
        place: The place.
        members: Its stacks.

    Returns:
        Whether the targets were written.
    """
    if len(members) == 1 or place.factors is None or place.result is None:
        return False
    targets = [target for stack in members for target in stack.targets]
    scale = targets[0].scale
    wanted = [part.shape for part in place.results]
    if [target.tensor.shape for target in targets] != wanted or any(
        target.keep != 0.0 or target.scale != scale or target.tensor.dtype is not place.result.dtype
        for target in targets
    ):
        return False
    torch.baddbmm(place.result, *place.factors, beta=0.0, alpha=scale, out=place.result)
    torch._foreach_copy_([target.tensor for target in targets], place.results)
    return True
