"""Turns are taken in order, warm-up is thrown away, and a spread is what its values say."""

from __future__ import annotations

import time

import jax.numpy as jnp
import pytest

from eaglejax.measure.timing import Spread, alternate, seconds


def test_tasks_take_turns_and_warm_up_is_thrown_away():
    calls: list[str] = []
    ticks: list[int] = []

    def task(name: str):
        return lambda: calls.append(name) or len(calls)

    results = alternate({n: task(n) for n in "abc"}, repeats=2, warm_up=1, done=lambda: ticks.append(0))
    assert "".join(calls) == "abcabcabc"
    assert results == {"a": [4, 7], "b": [5, 8], "c": [6, 9]}
    assert len(ticks) == 9
    assert alternate({"a": task("a")}, repeats=1, warm_up=0) == {"a": [10]}


def test_spread():
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high) == (2.5, 1, 10)
    assert spread.to_json() == {"median": 2.5, "min": 1.0, "max": 10.0, "values": [3.0, 1.0, 2.0, 10.0]}
    with pytest.raises(ValueError, match="no measurement"):
        Spread.of([])


def test_seconds_waits_for_the_result(monkeypatch):
    waited = []
    monkeypatch.setattr("jax.block_until_ready", lambda x: waited.append(x) or time.sleep(0.02))
    assert seconds(lambda: jnp.ones(2)) >= 0.02 and len(waited) == 1
