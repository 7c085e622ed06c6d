"""Where a draft's config can be read in two ways, its accuracy on the target's own text decides which layers it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from eaglejax.config import Sampling
from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.teacher import Teacher

# tokens, and difference in accuracy, that decide between two readings
LEAST, MARGIN = 100, 0.01


def settle_capture(pair: Pair, teacher: Teacher, generate: Callable[..., list[Generation]], max_len: int) -> None:
    """Take the better of the pair's two readings, and say both figures in its load report.

    Arguments:
        generate: the engine's own, for a few hundred tokens by plain decoding.
    """
    assert pair.capture is not None and pair.draft is not None
    sample = _sample(pair.target.config.vocab_size, generate, max_len)
    readings = dict(pair.capture.alternatives)
    figures = {name: teacher.first_token_accuracy(boundaries, sample) for name, boundaries in readings.items()}
    best = max(figures, key=lambda name: figures[name])
    said = "; ".join(f"{name} {readings[name]}: {figures[name]:.1%}" for name in figures)
    tokens = sum(len(text) - 1 for text in sample)
    clear = tokens >= LEAST and max(figures.values()) - min(figures.values()) > MARGIN
    verdict = "Took" if clear else "NOT DECIDED by this measurement; took"
    pair.report.warn(
        f"{pair.capture.source}: position-0 accuracy of the draft over "
        f"{tokens} tokens: {said}. {verdict} {best}: boundaries {readings[best]}. "
        f"capture={best!r} or capture={tuple(readings[best])} settles it"
    )
    pair.capture = replace(pair.capture, boundaries=readings[best], alternatives=())


def _sample(vocab_size: int, generate: Callable[..., list[Generation]], max_len: int) -> list[list[int]]:
    """Texts of the target's own making, from seeded sampling after single tokens."""
    starts = np.random.default_rng(0).integers(0, vocab_size, 4)
    asked = Sampling(max_new_tokens=min(80, max_len - 1), temperature=1.0, seed=0, ignore_eos=True)
    answers = generate([[int(i)] for i in starts], asked, speculation=None)
    return [answer.prompt_token_ids + answer.token_ids for answer in answers]
