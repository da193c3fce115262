"""What a user sees while training: one bar on a terminal, plain lines elsewhere. Rank 0 only."""

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_SHOW_CURSOR_ON_A_FREE_LINE = "\x1b[?25h\r\x1b[2K"


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
        """Write a line if the step is logged."""
        if is_logged:
            self.line(f"step {step:>{len(str(self._total))}}/{self._total}  {values}")

    def line(self, text: str) -> None:
        """Write at once."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to do."""


class _Values(ProgressColumn):
    """The metrics of the last step; what does not fit is cut off, so that the columns before it stay."""

    def render(self, task: Task) -> Text:
        """The text of a task."""
        return Text(task.fields["values"], no_wrap=True, overflow="ellipsis")


class Bar:
    """A moving bar, as wide as the terminal leaves room behind step, remaining time and metrics."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        columns = (
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _Values(table_column=Column()),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
        )
        self._progress = Progress(*columns, console=console or Console(), expand=True)
        self._task = self._progress.add_task("", total=total, values="")
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


def make_display(total: int, *, is_first_rank: bool) -> Display:
    """The right display for this process.

    Args:
        total: Steps of the run.
        is_first_rank: Whether this is global rank 0.

    Returns:
        A bar on a terminal, lines elsewhere, nothing on other ranks.
    """
    if not is_first_rank:
        return Silent()
    return Bar(total) if sys.stdout.isatty() else Lines(total)


def tidy_terminal(stream: TextIO) -> None:
    """After a rank that was killed while it drew: the cursor again, on a line without half a bar.

    Args:
        stream: Where the bar was drawn; nothing happens unless it is a terminal.
    """
    if stream.isatty():
        stream.write(_SHOW_CURSOR_ON_A_FREE_LINE)
        stream.flush()
