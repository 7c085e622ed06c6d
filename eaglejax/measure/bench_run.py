"""One cell, once: all prompts of a set answered, in waves that fill every slot, with the clock read around each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eaglejax.config import Sampling, Speculation
from eaglejax.engine import EagleJaxEngine
from eaglejax.generation import Generation
from eaglejax.measure.acceptance import share
from eaglejax.measure.compile_clock import CompileClock


@dataclass(frozen=True)
class Run:
    """What came of it. No second of compilation is in `first_token` or `decode_seconds`.

    `answers`: in the order of the prompts. `first_token`: seconds from asking to the first token, of each wave. `decode_seconds`: of all
    waves, after their first tokens. `cycles`: rounds of the compiled loop, those of the longest answer of each wave.
    `compile_seconds`: that the run spent on compilation all the same.
    """

    answers: tuple[Generation, ...]
    first_token: tuple[float, ...]
    decode_seconds: float
    cycles: int
    compile_seconds: float

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(answer.stats.new_tokens for answer in self.answers)

    @property
    def decode_tokens(self) -> int:
        """New tokens after the first of each answer, which comes from the prefill."""
        return sum(max(answer.stats.new_tokens - 1, 0) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """`decode_tokens` over `decode_seconds`; NaN where nothing was decoded."""
        return share(self.decode_tokens, self.decode_seconds)

    @property
    def cycle_seconds(self) -> float:
        """Of one round of the loop, all slots together."""
        return share(self.decode_seconds, self.cycles)

    @property
    def live_slots(self) -> float:
        """Slots that took part in a round, on average: a wave waits for its longest answer."""
        return share(sum(answer.stats.cycles for answer in self.answers), self.cycles)

    @property
    def tokens_per_second_with_prefill(self) -> float:
        """All new tokens over the whole time, prefill included."""
        return share(self.tokens, math.fsum(self.first_token) + self.decode_seconds)


def fill_waves(prompts: Sequence[list[int]], slots: int) -> list[list[int]]:
    """The prompts, from the first again until the last wave is full: a wave with empty slots is another program, and another speed."""
    missing = -len(prompts) % slots
    return [*prompts, *(prompts[index % len(prompts)] for index in range(missing))]


def run_once(
    engine: EagleJaxEngine, prompts: Sequence[list[int]], sampling: Sampling, spec: Speculation, clock: CompileClock
) -> Run:
    """Answers all prompts, as many at a time as the engine has slots."""
    answers: list[Generation] = []
    first_token, decoding, compiling, cycles = [], [], [], 0
    for first in range(0, len(prompts), engine.slots):
        begin = time.perf_counter()
        wave = engine.generate(list(prompts[first : first + engine.slots]), sampling, speculation=spec)
        end = time.perf_counter()
        # all answers of a wave carry the wave's times; decoding is the last part of it
        stats = wave[0].stats
        middle = end - stats.decode_seconds
        before, after = clock.between(begin, middle), clock.between(middle, end)
        first_token.append(stats.prefill_seconds - before)
        decoding.append(stats.decode_seconds - after)
        compiling.append(before + after)
        cycles += max(answer.stats.cycles for answer in wave)
        answers += wave
    return Run(tuple(answers), tuple(first_token), math.fsum(decoding), cycles, math.fsum(compiling))
