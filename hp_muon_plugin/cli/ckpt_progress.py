"""What a user sees while a checkpoint is converted: a bar on a terminal, a line per stage elsewhere. On stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hp_muon_plugin.checkpoint import progress as stages


class Bar(stages.Progress):
    """A moving bar with bytes, rate and time left."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._progress = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        self._task: TaskID | None = None
        self._progress.start()

    def begin(self, what: str, total: int) -> None:
        """Begin a stage."""
        self._task = self._progress.add_task(what, total=max(1, total))

    def advance(self, nbytes: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, nbytes)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()


class Lines(stages.Progress):
    """A line at the end of each stage."""

    def __init__(self) -> None:
        self._what = ""
        self._done = self._begun = 0.0

    def begin(self, what: str, total: int) -> None:
        """Begin a stage."""
        self._finish()
        self._what, self._done, self._begun = what, 0.0, time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr)

    def close(self) -> None:
        """End the last stage."""
        self._finish()

    def _finish(self) -> None:
        if self._what:
            seconds = time.monotonic() - self._begun
            print(f"{self._what}: {self._done / 2**30:.2f} GiB in {seconds:.1f} s", file=sys.stderr)
        self._what = ""


@contextmanager
def progress() -> Iterator[stages.Progress]:
    """The display that fits where stderr goes."""
    console = Console(stderr=True)
    shown: stages.Progress = Bar(console) if console.is_terminal else Lines()
    try:
        yield shown
    finally:
        shown.close()
