"""Parsers of commands whose flags are written out."""

import argparse
from typing import Any


class _WholeFlags(argparse.ArgumentParser):
    """A parser that takes no beginning of a flag for it: ``--w`` is a mistake, and not ``--weights-only``.

    Args:
        options: As of argparse.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})


WHOLE_FLAGS: type[argparse.ArgumentParser] = _WholeFlags
