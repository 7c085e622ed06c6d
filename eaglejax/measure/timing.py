"""Timing that is fair on a machine that others use too: warm, alternating, repeated, told as a median with its range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing, in the order they were made."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there is no measurement."""
        if not values:
            raise ValueError("no measurement")
        return cls(tuple(float(value) for value in values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_json(self) -> dict[str, Any]:
        """median, min, max and every value."""
        return {"median": self.median, "min": self.low, "max": self.high, "values": list(self.values)}


def seconds(run: Callable[[], Any]) -> float:
    """Wall seconds of a call, until what it returns is computed: a dispatched program is not a finished one."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def alternate(
    tasks: Mapping[Key, Callable[[], Result]],
    *,
    repeats: int,
    warm_up: int = 1,
    done: Callable[[], object] = lambda: None,
) -> dict[Key, list[Result]]:
    """What every task returned, `repeats` times.

    The tasks take turns (a b c, a b c, ..), so that a machine that grows slower grows slower for all. The first `warm_up` turns, which
    compile and touch memory for the first time, are thrown away.

    Arguments:
        done: called after every single run, for a progress bar.
    """
    results: dict[Key, list[Result]] = {key: [] for key in tasks}
    for turn in range(warm_up + repeats):
        for key, task in tasks.items():
            result = task()
            if turn >= warm_up:
                results[key].append(result)
            done()
    return results
