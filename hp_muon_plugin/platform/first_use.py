"""In which order ranks first use their groups, and whether HCCL could connect them in that order.

HCCL connects a group at its first collective, and every member waits there for the others. Two ranks
that share two groups must therefore first use them in one order, and so must longer circles: with
groups of ranks {0, 1}, {1, 2} and {2, 0}, each rank can start on another group and all wait forever.
"""

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from hp_muon_plugin.platform.collectives import AxisGroup


@dataclasses.dataclass(frozen=True, slots=True)
class UsedGroup:
    """A group, as all its members know it.

    Attributes:
        name: c10d's name of the group, the same on all members.
        axis: The axis that it stands for on the rank that recorded it.
        ranks: Its global ranks.
    """

    name: str
    axis: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.axis!r} {list(self.ranks)}"


class FirstUses:
    """The groups that this rank has used, by first use."""

    def __init__(self) -> None:
        self.groups: list[UsedGroup] = []

    def __str__(self) -> str:
        return ", ".join(str(group) for group in self.groups) or "none"

    def record(self, axis: AxisGroup) -> None:
        """Note a use.

        Args:
            axis: The axis of a call; an axis of one rank needs no connection and is not noted.
        """
        if axis.group is None:
            return
        name = axis.group.group_name
        if all(group.name != name for group in self.groups):
            ranks = tuple(dist.get_process_group_ranks(axis.group))
            self.groups.append(UsedGroup(name, axis.axis, ranks))


def find_conflict(orders: Sequence[Sequence[UsedGroup]]) -> str | None:
    """Look for ranks that would wait for each other.

    Args:
        orders: Each rank's groups by first use, in rank order.

    Returns:
        What is wrong, with ranks and groups; None if all groups can be connected.
    """
    left = [list(order) for order in orders]
    while any(left):
        ready = next((order[0] for order in left if order and _all_are_at(order[0], left)), None)
        if ready is None:
            return _describe(left)
        for rank in ready.ranks:
            left[rank].pop(0)
    return None


def _all_are_at(group: UsedGroup, left: Sequence[Sequence[UsedGroup]]) -> bool:
    return all(left[rank] and left[rank][0].name == group.name for rank in group.ranks)


def _describe(left: Sequence[Sequence[UsedGroup]]) -> str:
    """Who waits for whom: every rank that has a next group, and a member that is elsewhere."""
    lines = []
    for rank, order in enumerate(left):
        if not order:
            continue
        for other in order[0].ranks:
            if not left[other]:
                lines.append(f"rank {rank} uses {order[0]}, which rank {other} never uses")
            elif left[other][0].name != order[0].name:
                lines.append(f"rank {rank} uses {order[0]} next, where rank {other} uses {left[other][0]}")
    return "; ".join(lines)
