"""Standard input, output and error of a command that was started without them, as after ``>&-``."""

import os
import sys


def open_missing() -> None:
    """Open what is closed on the null device, so that no other file or pipe gets its number, and ranks inherit it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            assert opened == number
            os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
