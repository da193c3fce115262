"""What several test processes need is made by the first one that asks for it."""

import fcntl
import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

_P = ParamSpec("_P")
_R = TypeVar("_R")
_root = Path(tempfile.gettempdir())


def share_in(factory: pytest.TempPathFactory) -> None:
    """Keep what is made in the folder of this test run, which all its processes have."""
    global _root
    own = factory.getbasetemp()
    _root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of this test run.

    Args:
        name: Of the folder.
        make: Fills the empty folder. If it fails, whoever asks next tries again.

    Returns:
        The folder, filled.
    """
    folder, done = _root / name, _root / f"{name}.done"
    with (_root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def computed_once(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As ``functools.cache``, for all processes of this test run.

    Args:
        function: Its result depends on its arguments alone, which ``repr`` tells apart.

    Returns:
        The function, which is called once for each set of arguments.
    """

    known: dict[str, Any] = {}

    @functools.wraps(function)
    def found(*arguments: Any) -> Any:
        key = f"{function.__module__}.{function.__qualname__}{arguments!r}"

        def make(folder: Path) -> None:
            (folder / "result").write_bytes(pickle.dumps(function(*arguments)))  # type: ignore[call-arg]

        if key not in known:
            folder = made_once(hashlib.sha256(key.encode()).hexdigest()[:24], make)
            known[key] = pickle.loads((folder / "result").read_bytes())
        return known[key]

    return found  # type: ignore[return-value]
