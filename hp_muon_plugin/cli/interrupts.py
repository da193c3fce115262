"""Remembers that Ctrl-C was pressed, where a library turns the interruption into another error or drops it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_seen: list[int] = []


@contextmanager
def remembered() -> Iterator[None]:
    """Within it, Ctrl-C raises ``KeyboardInterrupt`` as ever, and :func:`raise_if_interrupted` knows of it.

    A handler that somebody else has set stays.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _seen.clear()
    signal.signal(signal.SIGINT, _handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_if_interrupted() -> None:
    """Call it before the user is told of an error, and before work starts.

    Raises:
        KeyboardInterrupt: If Ctrl-C was pressed since the command began.
    """
    if _seen:
        raise KeyboardInterrupt


def _handle(number: int, _frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt
