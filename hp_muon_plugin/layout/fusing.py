"""Which buckets replicas reduce together: neighbours, in messages that are large enough for a slow link."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

_GROUPS = 8  # so that all but the last eighth of what the slow link carries hides behind backward
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 32 << 20

Item = TypeVar("Item")


def fuse(items: Sequence[tuple[Item, Hashable, int]], least_bytes: int | None) -> list[list[Item]]:
    """Fuse neighbours of one kind. Those of another kind may lie between (of layers with experts, two alternate).

    Args:
        items: What is fused, in the order in which backward reaches it: the thing, its kind, its bytes.
        least_bytes: A group is closed when it holds this much. None: an eighth of all, from 1 to 32 MiB.

    Returns:
        Groups; each item is in exactly one, in order.
    """
    if least_bytes is None:
        least_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, sum(size for _, _, size in items) // _GROUPS))
    groups: list[list[Item]] = []
    pending: dict[Hashable, list[Item]] = {}
    held: dict[Hashable, int] = {}
    for item, kind, size in items:
        pending.setdefault(kind, []).append(item)
        held[kind] = held.get(kind, 0) + size
        if held[kind] >= least_bytes:
            groups.append(pending.pop(kind))
            del held[kind]
    return groups + list(pending.values())
