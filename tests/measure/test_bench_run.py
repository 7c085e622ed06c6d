"""One run of a cell: waves are full, and no second of compilation is in any of its times (trial 38)."""

from __future__ import annotations

import time

import pytest
from bench_made_up import answer

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.measure.bench_run import fill_waves, run_once
from eaglejax.measure.compile_clock import CompileClock


def test_waves_are_full():
    prompts = [[1], [2], [3]]
    assert fill_waves(prompts, 1) == prompts
    assert fill_waves(prompts, 2) == [[1], [2], [3], [1]]
    assert fill_waves(prompts, 8) == [[1], [2], [3], [1], [2], [3], [1], [2]]


class MadeUpEngine(EagleJaxEngine):
    """Two slots. The first wave takes 7 s: 5 to its first tokens, 2 of decoding; every later one 2.5 s: 0.5 and 2."""

    slots = 2

    def __init__(self, clock):
        self.clock, self.asked = clock, []

    def generate(self, prompts, sampling, *, speculation):
        self.asked.append((len(prompts), sampling, speculation))
        first = len(self.asked) == 1
        self.clock.now += 7.0 if first else 2.5
        made = [answer([1, 1, 0], [5, 6, 7, 8, 9]), answer([1], [5, 6])]
        for one in made:
            object.__setattr__(one.stats, "prefill_seconds", 5.0 if first else 0.5)
            object.__setattr__(one.stats, "decode_seconds", 2.0)
        return made


class MadeUpClock(CompileClock):
    """Compiling from 0 to 4.5 s (prefill) and from 5 to 5.25 s (decoding)."""

    def __init__(self):
        self.now = 0.0

    def between(self, begin, end):
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in ((0.0, 4.5), (5.0, 5.25)))


def test_trial_38_compilation_is_told_apart(monkeypatch):
    clock = MadeUpClock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    engine = MadeUpEngine(clock)
    sampling, spec = Sampling(max_new_tokens=5), Speculation(1)
    made = run_once(engine, [[1], [2], [3], [4]], sampling, spec, clock)
    assert engine.asked == [(2, sampling, spec)] * 2
    assert made.first_token == pytest.approx((0.5, 0.5)) and made.compile_seconds == pytest.approx(4.75)
    assert made.decode_seconds == pytest.approx(2 - 0.25 + 2)
    assert (made.tokens, made.decode_tokens, made.cycles) == (14, 10, 6)
    assert made.tokens_per_second * made.decode_seconds == pytest.approx(10)
    assert made.live_slots == pytest.approx(8 / 6) and made.cycle_seconds == pytest.approx(3.75 / 6)
