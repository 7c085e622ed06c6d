"""How long jax spent making programs: tracing, lowering, compiling or fetching from the cache.

Told apart, so that it is never counted as decoding.
"""

from __future__ import annotations

import time
from typing import Any

import jax.monitoring

_EVENTS = "/jax/core/compile/"


class CompileClock:
    """Listens from its construction on. Times are those of `time.perf_counter`."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.startswith(_EVENTS):
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def between(self, begin: float, end: float) -> float:
        """Seconds of compilation in a stretch of time. What lies in one another (trace in trace) counts once."""
        total, reached = 0.0, begin
        for first, last in sorted(self._spans):
            first, last = max(first, reached), min(last, end)
            if last > first:
                total, reached = total + last - first, last
        return total
