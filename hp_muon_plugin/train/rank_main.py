"""A rank of our launcher: ``python -m hp_muon_plugin.train.rank_main CONFIG FOLDER``, or forked by ``nursery.py``.

No rank may outlive a launcher that is killed, also while it still imports. So this module imports
nothing but the standard library, and the rank's own imports come after the system was asked.
"""

import contextlib
import ctypes
import os
import signal
import sys

LAUNCHER = "HP_MUON_LAUNCHER_PID"
"""Environment variable with the launcher's process id."""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def die_with(parent: int) -> None:
    """Linux: end when a process ends that started this one; at once if it has ended already.

    Args:
        parent: Its process id.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def import_ahead() -> None:
    """Import what ranks need, in a process that forks them."""
    from hp_muon_plugin.train.import_ahead import import_ahead

    import_ahead()


def main() -> None:
    """Entry point of a rank."""
    die_with(int(os.environ[LAUNCHER]))
    from hp_muon_plugin.train.worker import run_process

    run_process(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()
