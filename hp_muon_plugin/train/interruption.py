"""A signal that asks the run to end after the step that is under way, with a checkpoint."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

_asked: list[int] = []


def is_asked() -> bool:
    """Whether this rank was asked to end."""
    return bool(_asked)


@contextlib.contextmanager
def noted(*, is_wanted: bool) -> Iterator[None]:
    """Within it SIGTERM and Ctrl-C are noted; a second one does what it did before.

    Args:
        is_wanted: False leaves signals as they are.
    """
    _asked.clear()
    if not is_wanted:
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        _asked.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
