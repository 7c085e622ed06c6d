"""From operations that overlap to a wall time that adds up.

A device's window is swept once. An instant in which operations run is given to their phases, in equal parts where several run at the same
time (on several threads of a CPU, on several streams of a GPU). An instant in which none runs is given to the phase of the operation that
begins next, as its waiting: it is being launched, or waits for a thread. What lies before the first operation and after the last one is
the host's. So every instant has exactly one owner, and nothing is a difference of two measurements.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from eaglejax.measure.profile_events import Op, Span

HOST_DISPATCH, HOST_RETURN = "host: dispatch", "host: return"
UNNAMED = "unnamed"


@dataclass
class Times:
    """Nanoseconds by phase: `busy` with its operations running, `waiting` before them; `ops` counts them."""

    busy: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    ops: dict[str, float] = field(default_factory=dict)

    def add(self, other: Times) -> None:
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            for phase, value in theirs.items():
                mine[phase] = mine.get(phase, 0.0) + value

    def scaled(self, factor: float) -> Times:
        return Times(*({phase: factor * value for phase, value in part.items()} for part in self._parts))

    @property
    def _parts(self) -> tuple[dict[str, float], ...]:
        return self.busy, self.waiting, self.ops

    def of(self, phase: str) -> float:
        return self.busy.get(phase, 0.0) + self.waiting.get(phase, 0.0)

    @property
    def phases(self) -> set[str]:
        return set(self.busy) | set(self.waiting)

    @property
    def total(self) -> float:
        return sum(map(self.of, self.phases))


def sweep(ops: Sequence[Op], window: Span) -> Times:
    """The times of one device's operations inside a window of the host."""
    inside = sorted((op for op in ops if op.end > window.begin and op.begin < window.end), key=lambda op: op.begin)
    times = Times()
    if not inside:
        times.busy[HOST_DISPATCH] = window.end - window.begin
        return times
    now = max(window.begin, inside[0].begin)
    times.busy[HOST_DISPATCH] = now - window.begin
    running: list[tuple[float, int, str]] = []  # (end, number, phase), earliest end first
    for number, op in enumerate(inside):
        phase = op.phase or UNNAMED
        times.ops[phase] = times.ops.get(phase, 0.0) + 1
        now = _run_until(op.begin, now, running, times.busy)
        if op.begin > now:  # nothing ran
            times.waiting[phase] = times.waiting.get(phase, 0.0) + op.begin - now
            now = op.begin
        heapq.heappush(running, (min(op.end, window.end), number, phase))
    now = _run_until(window.end, now, running, times.busy)
    times.busy[HOST_RETURN] = window.end - now
    return times


def _run_until(until: float, now: float, running: list[tuple[float, int, str]], busy: dict[str, float]) -> float:
    """Give the instants from `now` on to what is running, until `until` or until nothing runs; returns where that was."""
    while running and now < until:
        end = max(now, min(running[0][0], until))
        share = (end - now) / len(running)
        for _, _, phase in running:
            busy[phase] = busy.get(phase, 0.0) + share
        now = end
        while running and running[0][0] <= now:
            heapq.heappop(running)
    while running and running[0][0] <= now:
        heapq.heappop(running)
    return now
