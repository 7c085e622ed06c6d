"""An engine opened from settings, and timed calls of it. Importing this imports jax."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from eaglejax.cli.answers import Times
from eaglejax.cli.compile_cache import use_compile_cache
from eaglejax.config import Sampling
from eaglejax.engine import EagleJaxEngine
from eaglejax.generation import Generation
from eaglejax.measure.compile_clock import CompileClock
from eaglejax.run_config import RunConfig


class Session:
    """An engine with a clock beside it."""

    def __init__(self, settings: RunConfig, *, report: bool):
        use_compile_cache()
        self._clock = CompileClock()
        self.engine = EagleJaxEngine.from_pretrained(**settings.engine_arguments())
        if report:
            print(self.engine.load_report, file=sys.stderr)

    @property
    def has_text(self) -> bool:
        """Whether the model has a tokenizer: answers are ids otherwise."""
        return self.engine.has_tokenizer

    def stream(self, prompt: Any, sampling: Sampling, show: Callable[[str], object]) -> tuple[Generation, Times]:
        """One answer, its text handed to `show` as it comes."""
        begin = time.perf_counter()
        first, answer = None, None
        for chunk in self.engine.stream(prompt, sampling):
            first = first or time.perf_counter()
            if chunk.text:
                show(chunk.text)
            answer = chunk.generation
        assert first is not None and answer is not None
        return answer, self._times(begin, first, answer)

    def generate(self, prompts: Sequence[Any], sampling: Sampling) -> tuple[list[Generation], Times]:
        """The answers to prompts that run together: as many as the engine has slots, at most."""
        begin = time.perf_counter()
        answers = self.engine.generate(list(prompts), sampling)
        # all answers of a wave carry the wave's times; its first tokens were there before its decoding began
        first = time.perf_counter() - max(answer.stats.decode_seconds for answer in answers)
        return answers, self._times(begin, first, *answers)

    def _times(self, begin: float, first: float, *answers: Generation) -> Times:
        compile_decode = self._clock.between(first, time.perf_counter())
        return Times(
            first=first - begin,
            compile_first=self._clock.between(begin, first),
            decode=max(answer.stats.decode_seconds for answer in answers) - compile_decode,
            compile_decode=compile_decode,
        )
