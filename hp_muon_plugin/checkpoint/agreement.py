"""Steps that all ranks take together: one that fails stops all of them with its cause, and none waits for it."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hp_muon_plugin.checkpoint.folders import NO_ROOM
from hp_muon_plugin.errors import CheckpointError, HpMuonError
from hp_muon_plugin.platform.failures import naming

T = TypeVar("T")


class Team:
    """The ranks that save and load together, over the host's memory whatever the device.

    All of them must make one, and call its methods in the same order.
    """

    def __init__(self) -> None:
        self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        is_gloo = self.size == 1 or str(dist.get_backend()) == "gloo"
        self._group = None if is_gloo else dist.new_group(backend="gloo")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def all(self, what: str, function: Callable[[], T]) -> list[T]:
        """Let every rank do something.

        Args:
            what: What is done, for the message.
            function: What this rank does. Whatever it raises stops all ranks.

        Returns:
            What each rank returned, in rank order; on every rank.

        Raises:
            CheckpointError: On every rank, if one failed.
        """
        mine = _attempt(function)
        answers: list[Any] = [mine]
        if self.size > 1:
            answers = [None] * self.size
            with naming("{} on all ranks", what):
                dist.all_gather_object(answers, mine, group=self._group)
        _raise_first(what, answers)
        return [answer for _, answer in answers]

    def first(self, what: str, function: Callable[[], T]) -> T:
        """Let rank 0 do something.

        Args:
            what: What is done, for the message.
            function: What rank 0 does; other ranks do not call it.

        Returns:
            What it returned, on every rank.

        Raises:
            CheckpointError: On every rank, if it failed.
        """
        answer: list[Any] = [_attempt(function) if self.is_first else None]
        if self.size > 1:
            with naming("{} on all ranks", what):
                dist.broadcast_object_list(answer, src=0, group=self._group)
        _raise_first(what, answer)
        result: T = answer[0][1]
        return result

    def gathered(self, what: str, function: Callable[[], T]) -> list[T]:
        """Let every rank do something, and rank 0 know of it.

        Args:
            what: What is done, for the message.
            function: What this rank does.

        Returns:
            What each rank returned, on rank 0; nothing elsewhere.

        Raises:
            CheckpointError: On every rank, if one failed.
        """
        mine = _attempt(function)
        answers: list[Any] = [mine]
        if self.size > 1:
            answers = [None] * self.size
            with naming("{} on all ranks", what):
                dist.gather_object(mine, answers if self.is_first else None, dst=0, group=self._group)
        self.first(what, lambda: _raise_first(what, answers))
        return [answer for _, answer in answers] if self.is_first else []

    def scattered(self, what: str, function: Callable[[], list[T]]) -> T:
        """Let rank 0 make something for each rank.

        Args:
            what: What is done, for the message.
            function: What rank 0 does: one object for each rank.

        Returns:
            This rank's.

        Raises:
            CheckpointError: On every rank, if it failed.
        """
        made: list[Any] = [_attempt(function)] if self.is_first else []
        self.first(what, lambda: _raise_first(what, made))
        objects: list[T] = made[0][1] if made else []
        if self.size == 1:
            return objects[0]
        mine: list[Any] = [None]
        with naming("{} on all ranks", what):
            dist.scatter_object_list(mine, objects if self.is_first else None, src=0, group=self._group)
        own: T = mine[0]
        return own

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Maxima over all ranks.

        Args:
            *numbers: This rank's.

        Returns:
            The same numbers on every rank.
        """
        if self.size == 1:
            return numbers
        flags = torch.tensor(numbers, dtype=torch.int64)
        with naming("{} over all ranks", "maximum of a state of saving"):  # all ranks, 8 bytes a number; the host waits
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(int(flag) for flag in flags)


_CUT_SHORT = re.compile(
    r"inline_container.*(unexpected pos|failed writing|write failed)"
)  # torch's words for a full disk
_Answer = tuple[str | None, Any]


def _attempt(function: Callable[[], Any]) -> _Answer:
    """What a function returned, or why it failed; exceptions travel between ranks as text."""
    try:
        return None, function()
    except HpMuonError as error:
        return str(error), None
    except Exception as error:  # it stops all ranks
        is_full = isinstance(error, OSError) and error.errno in NO_ROOM
        room = "\n  fix: make room on the disk, or save elsewhere" if is_full or _CUT_SHORT.search(str(error)) else ""
        return f"{type(error).__name__}: {error}{room}", None


def _raise_first(what: str, answers: list[_Answer]) -> None:
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            prefix = f"rank {rank}: " if len(answers) > 1 else ""
            raise CheckpointError(failure if failure.startswith(what) else f"{what}: {prefix}{failure}")
