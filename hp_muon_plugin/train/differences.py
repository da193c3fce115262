"""What a run does otherwise than the run whose checkpoint it goes on from."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def changed_values(saved: Mapping[str, Any], own: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Values that differ.

    Args:
        saved: Of the run that saved the checkpoint, as JSON has them.
        own: This run's.
        prefix: Of their names, as ``optimizer.``.

    Yields:
        Such as ``optimizer.split_qkv true -> false``. What only one version knows is left out.
    """
    for name, before in saved.items():
        now = own.get(name, before)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from changed_values(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name} {_shown(before)} -> {_shown(now)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
