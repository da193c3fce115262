"""Streams and events of a device that runs everything in order, at once."""

import time
from typing import Any


class CpuEvent:
    """An event that has always happened; it knows when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Any = None) -> None:
        """Remember the time."""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always True."""
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds from this event to ``end``."""
        return 1e3 * (end._recorded_at - self._recorded_at)


class CpuStream:
    """The one stream."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "CpuStream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always True."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record and return an event."""
        event = event or CpuEvent()
        event.record()
        return event
