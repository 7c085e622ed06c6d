"""The tree builder against brute force, with a toy draft whose every output depends on the exact path that leads to it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglejax.config import Speculation
from eaglejax.models.draft import Draft
from eaglejax.models.rows import KVRows
from eaglejax.models.split import UNSPLIT
from eaglejax.speculation.draft import Tip, grow
from eaglejax.speculation.programs import empty_request
from eaglejax.speculation.tree import Pool, ancestors, rerank

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
from tree_numpy import build_tree  # noqa: E402

WIDTH, VOCAB = 8, 24


class ToyDraft(Draft):
    """hidden = tanh(A parent's hidden + table[token] + B sum of table[tokens it sees]); logits = C hidden.

    Wrong feedback, a sibling seen as an ancestor, or a missing ancestor each change the logits.
    """

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.a, self.b = rng.normal(size=(2, WIDTH, WIDTH)) / 2
        self.c, self.table = rng.normal(size=(VOCAB, WIDTH)) * 2, rng.normal(size=(VOCAB, WIDTH))
        self.start = rng.normal(size=WIDTH)
        self.target_ids = jnp.arange(VOCAB, dtype=jnp.int32) * 3 + 1  # target ids are not draft ids
        self.split = UNSPLIT

    def __call__(self, tokens, hidden, step, caches, earlier=None):
        table = jnp.asarray(self.table, jnp.float32)
        own = table[(tokens - 1) // 3]
        rows = own[:, :, None]
        if earlier is not None:
            rows = jnp.concatenate([earlier[0].keys, rows], axis=1)
        seen = jnp.einsum("btr,brd->btd", step.mask.astype(jnp.float32), rows[:, :, 0], precision="highest")
        mix = lambda x, w: jnp.einsum("btd,ed->bte", x, jnp.asarray(w, jnp.float32), precision="highest")
        out = jnp.tanh(mix(hidden, self.a) + own + mix(seen, self.b))
        return SimpleNamespace(hidden=out, feedback=out, rows=[KVRows(own[:, :, None], None)])

    def logits(self, hidden):
        return jnp.einsum("btd,vd->btv", hidden, jnp.asarray(self.c, jnp.float32), precision="highest")

    def next_logprobs(self, path):
        hidden, seen = self.start, np.zeros(WIDTH)
        for token in path:
            own = self.table[(token - 1) // 3]
            seen = seen + own
            hidden = np.tanh(self.a @ hidden + own + self.b @ seen)
        logits = self.c @ hidden
        out = np.full(VOCAB * 3 + 1, -np.inf)
        out[np.arange(VOCAB) * 3 + 1] = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        return out


@dataclass
class Shape:
    steps: int
    topk: int
    nodes: int


@st.composite
def shapes(draw):
    steps = draw(st.integers(1, 6))
    topk = draw(st.integers(1, 5))
    pool = topk + (steps - 1) * topk**2
    return Shape(steps, topk, steps + 1 if topk == 1 else draw(st.integers(2, min(pool + 1, 64))))


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 10_000))
def test_grown_trees_are_the_brute_force_trees(shape, seed):
    draft = ToyDraft(seed)
    spec = Speculation(shape.steps, shape.topk, shape.nodes)
    tip_state = jnp.asarray(draft.start, jnp.float32)[None]
    root = jnp.asarray([5], jnp.int32)
    tip = Tip(tip_state, tip_state, jnp.asarray([3], jnp.int32))
    tree = grow(draft, [], tip, root, tip.rows, empty_request(1), spec)
    want = build_tree(draft.next_logprobs, 5, shape.steps, shape.topk, shape.nodes)
    assert np.asarray(tree.tokens[0]).tolist() == want.tokens.tolist()
    assert np.asarray(tree.parents[0]).tolist() == want.parents.tolist()
    assert np.asarray(tree.depths[0]).tolist() == want.depths.tolist()
    assert np.array_equal(np.asarray(tree.mask[0]), want.mask)
    np.testing.assert_allclose(np.asarray(tree.scores[0]), want.scores, atol=2e-4)


@pytest.mark.parametrize("fault", ["nan", "ties", "minus_infinity"])
def test_rerank_stays_closed_under_ancestors(fault):
    rng = np.random.default_rng(0)
    topk, levels = 3, 4
    parents, scores, depths = [-1] * topk, list(-rng.integers(0, 2, topk).astype(float)), [1] * topk
    first = 0
    for level in range(2, levels + 1):
        frontier = sorted(range(first, len(scores)), key=lambda i: (-scores[i], i))[:topk]
        first = len(scores)
        for parent in frontier:
            for _ in range(topk):
                step = {"nan": 0.0, "ties": 0.0, "minus_infinity": -np.inf}[fault] if rng.random() < 0.6 else -1.0
                parents.append(parent)
                scores.append(scores[parent] + step)
                depths.append(level)
    pool = Pool(
        jnp.arange(len(scores), dtype=jnp.int32)[None],
        jnp.asarray(scores, jnp.float32)[None],
        jnp.asarray(parents, jnp.int32)[None],
        jnp.asarray(depths, jnp.int32),
    )
    for nodes in range(2, len(scores) + 2):
        tree = rerank(jnp.asarray([99], jnp.int32), pool, nodes, levels)
        chosen = np.asarray(tree.tokens[0, 1:])
        for node, candidate in enumerate(chosen, 1):
            parent = parents[candidate]
            assert parent == -1 or parent in chosen
            assert int(tree.parents[0, node]) == (0 if parent == -1 else 1 + chosen.tolist().index(parent))


def test_ancestors_of_a_long_chain():
    mask = np.asarray(ancestors(jnp.asarray([[-1, 0, 1, 2, 0]], jnp.int32), 3))[0]
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]
