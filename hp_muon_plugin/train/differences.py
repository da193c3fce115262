"""What a run does otherwise than the run whose checkpoint it goes on from."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def changed_options(saved: Mapping[str, Any], own: Mapping[str, Any], place: str) -> Iterator[str]:
    """Options that differ.

    Args:
        saved: Options of the run that saved the checkpoint, as JSON has them.
        own: This run's.
        place: Where they stand, as ``optimizer``.

    Yields:
        Such as ``optimizer.split_qkv true -> false``. What only one version knows is left out.
    """
    for name in [name for name in saved if name in own]:
        before, now = saved[name], own[name]
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from changed_options(before, now, f"{place}.{name}")
        elif before != now:
            yield f"{place}.{name} {_shown(before)} -> {_shown(now)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
