"""What is said when ranks cannot exchange something: which exchange it was, and that the cause is elsewhere.

A rank that ends takes its connections with it. Another one learns so where it waits for a message, or already
where it begins one, whichever comes first; it says the same in both cases.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class NotBegun:
    """In the place of what could not be begun: fails where it is waited for, where it is known what it was.

    Args:
        error: Why.
    """

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> NoReturn:
        """Raise it."""
        raise self._error


def failure(what: str, name: str, error: RuntimeError) -> RuntimeError:
    """The error of an exchange that did not come to its end.

    Args:
        what: What it is, with ``{}`` for the name.
        name: Of a module or an axis.
        error: What the backend says.

    Returns:
        The error to raise from it.
    """
    return RuntimeError(
        f"{what.format(name)} failed: another rank ended, or waits for something else\n"
        f"  fix: look at the first message of the other ranks ({error})"
    )


@contextmanager
def naming(what: str, name: str = "all ranks") -> Iterator[None]:
    """Name the exchange that is begun and waited for inside.

    Args:
        what: What it is, with ``{}`` for the name.
        name: Of an axis.

    Raises:
        RuntimeError: If it failed, saying which.
    """
    try:
        yield
    except RuntimeError as error:
        raise failure(what, name, error) from error
