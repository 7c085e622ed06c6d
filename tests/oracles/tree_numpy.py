"""EAGLE's dynamic draft tree by brute force: no vectors, one path at a time, so that it is plainly right.

A callback gives the draft's log-probabilities after any path, hence this reference knows nothing of models or caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

Path = tuple[int, ...]
NextLogprobs = Callable[[Path], Float[np.ndarray, " v"]]
"""`next_logprobs(path)`: log-probabilities over target ids after the root and the tokens of `path` (root left out,
so () is the root itself); -inf for ids that the draft does not know."""


@dataclass(frozen=True)
class Candidate:
    """A node of the candidate pool. `parent` is its index in the pool, None for a child of the root."""

    path: Path
    score: float
    parent: int | None


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root; the others are in the order in which they were generated, so parents come first."""

    tokens: Int[np.ndarray, " r"]
    parents: Int[np.ndarray, " r"]
    """Node number of the parent, -1 for the root."""
    depths: Int[np.ndarray, " r"]
    mask: Bool[np.ndarray, "r r"]
    """mask[i, j]: node i may attend to node j, which is itself or an ancestor."""
    scores: Float[np.ndarray, " r"]
    """Sum of log-probabilities from the root, which has 0."""
    pool_indices: Int[np.ndarray, " r"]
    """Index in the candidate pool, -1 for the root."""
    pool: list[Candidate]


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the `count` greatest, greatest first, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def build_pool(next_logprobs: NextLogprobs, levels: int, top_k: int) -> list[Candidate]:
    """All candidates: top_k children of the root, then (levels-1) times top_k children of each of top_k leaves.

    The leaves that are grown at a level are the best of the candidates that the level before added (not of the pool).
    """
    pool: list[Candidate] = []
    frontier: list[int | None] = [None]
    for _ in range(levels):
        added = []
        for parent in frontier:
            path, score = ((), 0.0) if parent is None else (pool[parent].path, pool[parent].score)
            logprobs = next_logprobs(path)
            for token in best(list(logprobs), top_k):
                if not np.isfinite(logprobs[token]):
                    raise ValueError(f"fewer than top_k={top_k} tokens have a finite log-probability after {path}")
                added.append(len(pool))
                pool.append(Candidate((*path, token), score + float(logprobs[token]), parent))
        frontier = [added[i] for i in best([pool[a].score for a in added], top_k)]
    return pool


def build_tree(next_logprobs: NextLogprobs, root: int, levels: int, top_k: int, total: int) -> Tree:
    """The tree of `total` nodes, root included: the best total-1 candidates of the pool.

    Args:
        next_logprobs: the draft, see `NextLogprobs`.
        root: the last verified token.
        levels: number of levels below the root (EAGLE's `depth` plus one).
        top_k: children of each grown leaf, and leaves grown at each level.
        total: nodes in the tree.

    Raises:
        ValueError: the pool is smaller than total-1, or too few tokens are finite.
    """
    pool = build_pool(next_logprobs, levels, top_k)
    if total - 1 > len(pool):
        raise ValueError(f"total={total} needs {total - 1} candidates, the pool has {len(pool)}")
    kept = sorted(best([c.score for c in pool], total - 1))
    node_of = {p: 1 + i for i, p in enumerate(kept)}
    parents, mask = [-1], np.eye(total, dtype=bool)
    for node, index in enumerate(kept, start=1):
        above = pool[index].parent
        # a child never scores above its parent and comes after it, so a kept node's parent is always kept
        parents.append(0 if above is None else node_of[above])
        mask[node] |= mask[parents[-1]]
    chosen = [pool[i] for i in kept]
    return Tree(
        tokens=np.array([root, *(c.path[-1] for c in chosen)]),
        parents=np.array(parents),
        depths=np.array([0, *(len(c.path) for c in chosen)]),
        mask=mask,
        scores=np.array([0.0, *(c.score for c in chosen)]),
        pool_indices=np.array([-1, *kept]),
        pool=pool,
    )


def leaf_paths(tree: Tree) -> list[list[int]]:
    """Node numbers from the root to each leaf, in ascending order of leaf."""
    inner = set(tree.parents.tolist())
    paths = []
    for leaf in range(len(tree.tokens)):
        if leaf in inner:
            continue
        path = [leaf]
        while path[0] != 0:
            path.insert(0, int(tree.parents[path[0]]))
        paths.append(path)
    return paths
