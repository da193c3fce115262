"""Where the time of a step goes: named spans, recorded only while somebody asks for them.

On CPU a span is wall time of this process. On accelerators it is the time between two events on the
current stream, read when the totals are asked for (not run on hardware by this project yet).
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hp_muon_plugin.platform.patching import Patcher, Replacement

NEWTON_SCHULZ = "newton_schulz"
COMMUNICATION = "communication"

_active: "Recorder | None" = None


class Clock(Protocol):
    """How the time between two marks is measured."""

    def mark(self) -> Any:
        """Now."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks."""


class HostClock:
    """Wall time of the host."""

    def mark(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        """Milliseconds between two marks."""
        return 1e3 * (end - start)


class EventClock:
    """Events on the current stream of an accelerator; the host waits when the time is read.

    Args:
        kind: ``cuda`` or ``npu``.
    """

    def __init__(self, kind: str) -> None:
        self._device = getattr(torch, kind)

    def mark(self) -> Any:
        """An event, recorded."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events."""
        end.synchronize()
        return float(start.elapsed_time(end))


class Recorder:
    """Totals of spans by the phase in which they lie.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: Clock = HostClock() if device.type == "cpu" else EventClock(device.type)
        self._spans: list[tuple[str, str, Any, Any]] = []
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record spans inside, and the whole as a span of its own.

        Args:
            name: Of the phase.
        """
        global _active
        before, self._phase, _active = _active, name, self
        patcher = Patcher()
        patcher.apply([Replacement(dist.Work, "wait", _timed_wait, "every wait for a collective goes through it")])
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((name, "", start, self._clock.mark()))
            patcher.restore()
            _active = before

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a span of the present phase.

        Args:
            name: What is done in it.
        """
        start = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((self._phase, name, start, self._clock.mark()))

    def totals_ms(self) -> dict[tuple[str, str], float]:
        """Totals by phase and name, and by phase and the empty name for the whole phase."""
        totals: dict[tuple[str, str], float] = {}
        for phase, name, start, end in self._spans:
            totals[phase, name] = totals.get((phase, name), 0.0) + self._clock.elapsed_ms(start, end)
        return totals


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Record a span if somebody records now; nothing otherwise.

    Args:
        name: What is done in it.

    Returns:
        A context manager.
    """
    return contextlib.nullcontext() if _active is None else _active.span(name)


def _timed_wait(original: Any) -> Any:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with span(COMMUNICATION):
            return original(work, *args, **kwargs)

    return wait
