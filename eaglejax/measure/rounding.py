"""Is the first token in which two answers differ a matter of rounding? The rule of docs/losslessness.md, on teacher-forced logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from eaglejax.config import Sampling

LIMIT = 1e-4  # of a perturbed score, of a scaled logit, of a probability, of a router's score: float32


@dataclass(frozen=True)
class Divergence:
    """The first token in which an answer leaves plain decoding, and what teacher forcing says of the two candidates.

    gap: perturbed score of the lower of the two below the best sure candidate; inf where one was filtered out. edge: distance of the
        nearer of the two to the edge of a filter. margin: smallest margin of a router at this token. limit: below this the three are
        rounding. cause: "score", "filter", "router", or "" when it is no rounding.
    """

    request: int
    index: int  # of the answer's token
    plain: int | None  # None: the answer ended there
    found: int | None
    gap: float
    cause: str
    edge: float = math.inf
    margin: float = math.inf
    limit: float = LIMIT

    @property
    def rounding(self) -> bool:
        """Whether rounding explains it."""
        return bool(self.cause)

    def __str__(self) -> str:
        explained = f"rounding ({self.cause})" if self.rounding else "NOT rounding"
        return (
            f"request {self.request}, token {self.index}: {self.found} in place of {self.plain}, {explained}; gap {self.gap:.2g}, filter "
            f"edge {self.edge:.2g}, router margin {self.margin:.2g}, limit {self.limit:.2g}"
        )


def first_difference(plain: list[int], found: list[int]) -> int | None:
    """Index of the first token that is not the same, or that only one of the two has."""
    for index, (a, b) in enumerate(zip(plain, found, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(found) else min(len(plain), len(found))


def candidates(
    scaled: Float[np.ndarray, " v"], sampling: Sampling, limit: float = LIMIT
) -> tuple[Bool[np.ndarray, " v"], Bool[np.ndarray, " v"]]:
    """Tokens [v] that the filters surely keep, and that they may keep, when all figures are only known to `limit`.

    Written apart from the engine's filters: a sort instead of a search, float64.
    """
    scaled = scaled.astype(np.float64)
    sure, may = np.ones(scaled.shape, bool), np.ones(scaled.shape, bool)
    for name, kept, keep, before in _filters(scaled, sampling):
        out = scaled[kept & ~keep]
        above = scaled > out.max() + limit if out.size else np.ones_like(keep)
        sure &= keep & above
        also = scaled >= scaled[kept & keep].min() - limit
        if name == "top_p":
            also |= before < sampling.top_p + limit
            sure &= before < sampling.top_p - limit
        if name == "min_p":
            sure &= scaled >= scaled.max() + math.log(sampling.min_p) + limit
            also = scaled >= scaled.max() + math.log(sampling.min_p) - limit
        may &= keep | also
    return sure, may


def edge_distance(scaled: Float[np.ndarray, " v"], sampling: Sampling, ids: tuple[int, int]) -> float:
    """How far, in scaled logits, the nearer of two tokens is from being on the other side of a filter's edge; inf without filters."""
    scaled, distances = scaled.astype(np.float64), [math.inf]
    for _, kept, keep, _ in _filters(scaled, sampling):
        out = scaled[kept & ~keep]
        highest, lowest = out.max() if out.size else -math.inf, scaled[kept & keep].min()
        distances += [float(scaled[i] - highest if keep[i] else lowest - scaled[i]) for i in ids if kept[i]]
    return min(distances)


def _filters(
    scaled: Float[np.ndarray, " v"], sampling: Sampling
) -> Iterator[tuple[str, Bool[np.ndarray, " v"], Bool[np.ndarray, " v"], Float[np.ndarray, " v"]]]:
    """Name, tokens kept so far, tokens that this filter keeps, and the probability mass before each, for every filter that is on."""
    kept = np.ones(scaled.shape, bool)
    before = np.zeros(scaled.shape)
    order = np.argsort(-scaled, kind="stable")
    if 0 < sampling.top_k < scaled.size:
        keep = scaled >= scaled[order[sampling.top_k - 1]]
        yield "top_k", kept, keep, before
        kept = kept & keep
    if sampling.top_p < 1:
        mass = np.where(kept, np.exp(scaled - scaled.max()), 0)
        before = np.empty_like(mass)
        before[order] = (np.cumsum(mass[order]) - mass[order]) / mass.sum()
        keep = before < sampling.top_p
        yield "top_p", kept, keep, before
        kept = kept & keep
    if sampling.min_p > 0:
        yield "min_p", kept, scaled >= scaled.max() + math.log(sampling.min_p), before


def examine(
    logits: Float[np.ndarray, " v"],
    noise: Float[np.ndarray, " v"],
    sampling: Sampling,
    pair: tuple[int, int],
    limit: float = LIMIT,
) -> tuple[float, str]:
    """Whether both tokens of `pair` could have been the draw, given teacher-forced logits [v] known to `limit`.

    Returns: how far the lower of the two lies below the best token that the filters surely keep, and the cause:
    "score" where both were candidates, "filter" where the edge of a filter decides over one of them, "" where rounding
    does not explain the pair.
    """
    ids = list(pair)
    if sampling.temperature == 0:
        gap = float(logits.max() - logits[ids].min())
        return gap, "score" if gap < limit else ""
    scaled = logits / np.float32(sampling.temperature)
    sure, may = candidates(scaled, sampling, limit)
    if not may[ids].all():
        return math.inf, ""
    scores = scaled + noise
    best = scores[sure].max() if sure.any() else -math.inf
    gap = float(max(best - scores[ids].min(), 0))
    if sure[ids].all():
        return gap, "score" if gap < limit else ""
    return gap, "filter" if gap < limit else ""
