"""What is said when ranks cannot exchange something: which exchange it was, and that the cause is elsewhere.

A rank that ends takes its connections with it. Another one learns so where it waits for a message, or already
where it begins one, whichever comes first; it says the same in both cases. Ranks that wait for different things
learn what the others wait for from the job's store.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_PREFIX = "hp_muon_failed_exchanges"
_NUM_READ = 8  # of all that failed: enough to see two that differ, and no load for the store of a large job
_PATIENCE_S = 2.0
_TIMES = itertools.count()


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
    told = what.format(name)
    others = "".join(f"  {line}\n" for line in _other_failures(told))
    run_alike = "let all ranks run the same modules in the same order, or " if others else ""
    return RuntimeError(
        f"{told} failed: another rank ended, or waits for something else\n{others}"
        f"  fix: {run_alike}look at the first message of the other ranks ({error})"
    )


def _other_failures(told: str) -> list[str]:
    """What other ranks' exchanges were that failed at about the same time, as the job's store has it."""
    patience_s = _PATIENCE_S if next(_TIMES) == 0 else 0.0  # after the first failure the job is at its end
    found: list[str] = []
    thread = threading.Thread(target=_look, args=(told, patience_s, found), daemon=True)
    thread.start()
    thread.join(2 * _PATIENCE_S)  # where the store's machine is gone, nothing answers
    return list(found)


def _look(told: str, patience_s: float, found: list[str]) -> None:
    import torch.distributed as dist  # here, for launchers name exchanges and have no torch
    from torch.distributed import distributed_c10d

    with suppress(RuntimeError, ValueError):  # no job, or a store that has ended with its rank
        store = distributed_c10d._get_default_store()
        store.set(f"{_PREFIX}/{store.add(_PREFIX, 1)}", f"rank {dist.get_rank()} waited for: {told}")
        deadline = time.monotonic() + patience_s
        while not found:
            keys = [f"{_PREFIX}/{number}" for number in range(1, min(store.add(_PREFIX, 0), _NUM_READ) + 1)]
            lines = [store.get(key).decode() for key in keys if store.check([key])]
            found += [line for line in lines if not line.endswith(f"waited for: {told}")]
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


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
