"""What a contender sends: collectives as c10d sees them, and bytes as the network interface counts them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STATISTICS = "/sys/class/net/{}/statistics/tx_bytes"
_IGNORED = ("barrier", "monitored_barrier_")
SLOW, FAST = "eth0", "lo"  # of a node of the testbed


@dataclass(slots=True)
class Calls:
    """Calls of c10d collectives, whoever made them.

    Attributes:
        num_calls: By name of the operator.
        num_bytes: Of the larger side of each: gathered output, scattered input.
    """

    num_calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)


class CountCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives while it is entered. On CPU backward runs on this thread, and is seen too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "c10d" and name not in _IGNORED:
            sides = [_bytes(argument) for argument in args]
            self.calls.num_calls[name.strip("_")] += 1
            self.calls.num_bytes[name.strip("_")] += max(sides, default=0)
        return func(*args, **(kwargs or {}))


def _bytes(tree: Any) -> int:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sent_bytes(interface: str) -> int | None:
    """Bytes that left an interface of this network namespace since it came up.

    Args:
        interface: Its name.

    Returns:
        The count; None if there is no such interface.
    """
    path = Path(_STATISTICS.format(interface))
    return int(path.read_text(encoding="ascii")) if path.is_file() else None


def private_interfaces(nodes: int) -> Iterator[str]:
    """Interfaces whose counters belong to this run alone.

    Args:
        nodes: Nodes of the testbed; 0 without it, where others use the interfaces too.

    Yields:
        Names.
    """
    if nodes:
        yield from (SLOW, FAST)
