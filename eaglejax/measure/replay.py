"""What any tree would have accepted of a known text, from the widest trees grown at every place of it.

A draft's tree depends on the committed prefix alone, and a drafted token is accepted exactly where it is the text's next one. So one run
that grows a wide tree at every token of an answer holds the answer's decoding with every smaller tree: its cycles are replayed here, one
after the other, as the loop would have run them. Exact for the topk that was grown and for chains where a chain was grown; for a topk in
between, a node whose children the wide run did not grow counts as having none (a lower bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from eaglejax.config import Speculation


@dataclass(frozen=True)
class GrownTree:
    """All candidates below one root, in the order of the pool: parents before children, siblings best first; node 0 is the root."""

    tokens: Int[np.ndarray, " n"]
    parents: Int[np.ndarray, " n"]
    depths: Int[np.ndarray, " n"]
    scores: Float[np.ndarray, " n"]


@dataclass(frozen=True)
class Text:
    """An answer, `tokens`, and the trees grown below each of its tokens but the last."""

    tokens: list[int]
    trees: list[GrownTree]


@dataclass(frozen=True)
class Replayed:
    """One setting on all texts: tokens per cycle, bonus included, the share of cycles that accept at least 1, 2, .. tokens, and the
    accepted tokens of every cycle, text by text."""

    tau: float
    reach: tuple[float, ...]
    counts: tuple[int, ...]


def path_ranks(tree: GrownTree, text: Sequence[int], steps: int, topk: int) -> list[int]:
    """The text's own path through the tree of `steps` levels and `topk` children: for each of its nodes how many candidates score better.

    A tree of N nodes accepts as many of them as have ranks below N - 1.
    """
    best_first = lambda nodes: sorted(nodes, key=lambda node: (-tree.scores[node], node))
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree.tokens)):
        children.setdefault(int(tree.parents[node]), []).append(node)
    pool, frontier, path, here = [], [0], [], 0
    for level in range(steps):
        grown = [child for node in sorted(frontier) for child in children.get(node, [])[:topk]]
        pool += grown
        if here is not None:
            ours = children.get(here, [])[:topk] if here in frontier else []
            fits = [node for node in ours if level < len(text) and tree.tokens[node] == text[level]]
            here = fits[0] if fits else None
            path += fits
        frontier = best_first(grown)[:topk]
    rank = {node: index for index, node in enumerate(best_first(pool))}
    return [rank[node] for node in path]


def replay(texts: Sequence[Text], steps: int, topk: int, sizes: Sequence[int]) -> dict[int, Replayed]:
    """N -> what the tree (steps, topk, N) would have done on the texts."""
    ranks = [
        [path_ranks(tree, text.tokens[place + 1 :], steps, topk) for place, tree in enumerate(text.trees)]
        for text in texts
    ]
    return {nodes: _cycles(texts, ranks, steps, nodes) for nodes in sizes}


def _cycles(texts: Sequence[Text], ranks: list[list[list[int]]], steps: int, nodes: int) -> Replayed:
    counts = []
    for text, found in zip(texts, ranks, strict=True):
        # a cycle near the end would have had more text to be right about: it is not counted
        place, last = 0, len(text.trees) - steps
        while place < last:
            accepted = sum(rank < nodes - 1 for rank in found[place])
            counts.append(accepted)
            place += accepted + 1
    cycles = max(len(counts), 1)
    reach = tuple(sum(count >= level for count in counts) / cycles for level in range(1, steps + 1))
    return Replayed(1 + sum(reach), reach, tuple(counts))


def first_guesses(texts: Sequence[Text]) -> float:
    """Share of places where the best candidate of level 1 is the text's next token."""
    right = [int(tree.tokens[1]) == text.tokens[place + 1] for text in texts for place, tree in enumerate(text.trees)]
    return sum(right) / max(len(right), 1)


def settings(chain_steps: int, tree_steps: int, topk: int, most_nodes: int) -> list[Speculation]:
    """The trees worth predicting: all chains, and trees of growing numbers of nodes."""
    chains = [Speculation(steps, 1) for steps in range(1, chain_steps + 1)]
    trees = [
        Speculation(steps, children, nodes)
        for children in (2, topk)
        for steps in range(1, tree_steps + 1)
        for nodes in (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
        if steps < nodes <= min(most_nodes, children + (steps - 1) * children**2 + 1)
    ]
    return chains + trees
