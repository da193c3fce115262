"""What a user sees while training: one bar on a terminal, plain lines elsewhere. Rank 0 only."""

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Shows the state of a run."""

    def update(self, step: int, values: str, *, is_logged: bool) -> None:
        """Show the state after a step."""

    def line(self, text: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Lines:
    """Plain lines at every logged step."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stdout

    def update(self, step: int, values: str, *, is_logged: bool) -> None:
        """Print a line if the step is logged."""
        if is_logged:
            self.line(f"step {step:>{len(str(self._total))}}/{self._total}  {values}")

    def line(self, text: str) -> None:
        """Print at once."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class Bar:
    """A moving bar."""

    def __init__(self, total: int, description: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console())
        self._task = self._progress.add_task(description, total=total, values="")
        self._progress.start()

    def update(self, step: int, values: str, *, is_logged: bool) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, values=values)

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


class Silent:
    """Every rank but the first."""

    def update(self, step: int, values: str, *, is_logged: bool) -> None:
        """Nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_display(total: int, description: str, *, is_first_rank: bool) -> Display:
    """The right display for this process.

    Args:
        total: Steps of the run.
        description: Name of the run.
        is_first_rank: Whether this is global rank 0.

    Returns:
        A bar on a terminal, lines elsewhere, nothing on other ranks.
    """
    if not is_first_rank:
        return Silent()
    return Bar(total, description) if sys.stdout.isatty() else Lines(total)
