"""Answers that go round in circles: a draft is splendid on them, and a benchmark made of them says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST = 64  # tokens of the piece that is repeated
COPIES = 3  # fewer are no loop
MOSTLY = 0.5
SHORTEST = 16  # of a shorter answer nothing is said


def repeated_share(token_ids: Sequence[int]) -> float:
    """The largest share of the answer that is one n-gram, n <= 64, repeated without a gap, at least three times in a row."""
    ids, best = np.asarray(token_ids, np.int64), 0
    for size in range(1, min(LONGEST, len(ids) // COPIES) + 1):
        # a stretch of `run` tokens equal to those `size` before them is one piece repeated over run + size tokens
        same = np.concatenate([[0], ids[size:] == ids[:-size], [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(same))
        run = int((edges[1::2] - edges[::2]).max(initial=0))
        if run >= size * (COPIES - 1):
            best = max(best, run + size)
    return best / len(ids) if len(ids) else 0.0


def mostly_repeated(token_ids: Sequence[int]) -> bool:
    """Whether more than half of an answer is one repeated n-gram."""
    return len(token_ids) >= SHORTEST and repeated_share(token_ids) > MOSTLY
