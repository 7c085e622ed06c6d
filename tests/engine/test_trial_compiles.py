"""Trial 39: after the warm-up nothing compiles, whatever is asked."""

import jax.monitoring
import numpy as np
import pairs
import pytest

from eaglejax import Sampling
from eaglejax.speculation.programs import prefill_plan

COMPILED = "/jax/core/compile/backend_compile_duration"


class Counter:
    """Counts compilations while it is on; jax has no public way to take one listener back."""

    def __init__(self):
        self.on, self.count = False, 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_) -> None:
        self.count += self.on and event == COMPILED

    def __enter__(self):
        self.on, self.count = True, 0
        return self

    def __exit__(self, *_):
        self.on = False


@pytest.fixture(scope="module")
def compiles():
    return Counter()


def draws(seed: int, number: int):
    """Random calls: 1 to 8 prompts of 1 to 110 tokens, each with a request of its own."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        size = int(rng.integers(1, 9))
        asked = [[int(i) for i in rng.integers(0, 64, rng.integers(1, 111))] for _ in range(size)]
        yield asked, [request(rng) for _ in range(size)]


def request(rng) -> Sampling:
    return Sampling(
        max_new_tokens=int(rng.integers(1, 51)),
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        seed=int(rng.integers(0, 3)),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.1])),
        stop=["qr"] if rng.random() < 0.2 else [],
        stop_token_ids=[int(i) for i in rng.integers(0, 64, rng.integers(0, 5))],
        ignore_eos=bool(rng.random() < 0.5),
    )


def test_trial_39_sixty_requests_compile_nothing(ring, compiles):
    """Widths 1, 2 and 4 with both prefill buckets are warmed up; 60 random calls then make no program."""
    assert {rows for n in range(1, 111) for _, rows in prefill_plan(n)} == {16, 64}
    for width in (1, 2, 4):
        ring.generate([[5] * 70] * width, Sampling(max_new_tokens=3))
    accepted = 0
    with compiles as after:
        for asked, samplings in draws(0, 60):
            answers = ring.generate(asked, samplings)
            accepted += sum(sum(answer.stats.accepted_per_cycle) for answer in answers)
            assert all(len(a.token_ids) <= s.max_new_tokens for a, s in zip(answers, samplings, strict=True))
        for _ in ring.stream([5, 6], Sampling(max_new_tokens=9), cycles=1):
            pass
    assert after.count == 0
    assert accepted > 1000  # drafts are at work


def test_trial_39_the_counter_hears_a_new_shape(ring, compiles):
    """A tree that was not warmed up does compile: the trial above can fail."""
    with compiles as heard:
        ring.propose(pairs.prompts([9])[0], pairs.Speculation(1, 2, 2))
    assert heard.count > 0
