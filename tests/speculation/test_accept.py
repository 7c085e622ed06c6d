"""The walk down the tree, the cut at stops and budgets, and the rows that reach the cache: each against plain Python."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglejax.models.rows import KVRows
from eaglejax.speculation.cache import commit, put_rows, take_rows
from eaglejax.speculation.loop import append
from eaglejax.speculation.programs import empty_request
from eaglejax.speculation.state import State
from eaglejax.speculation.tree import Tree, ancestors
from eaglejax.speculation.verify import accept


def random_tree(rng, nodes, levels, vocab):
    """Parents before children, siblings with different tokens, at most `levels` deep."""
    parents, depths, tokens = [-1], [0], [int(rng.integers(vocab))]
    for _ in range(20 * nodes):  # some shapes hold fewer nodes
        parent = int(rng.integers(len(parents)))
        taken = {tokens[i] for i, p in enumerate(parents) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if len(parents) < nodes and depths[parent] < levels and free:
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(int(rng.choice(free)))
    spare = nodes - len(parents)  # unreachable rows: no parent, no fitting token
    return tokens + [-1] * spare, parents + [-2] * spare, depths + [0] * spare


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 16), levels=st.integers(1, 5))
def test_walk_is_the_plain_walk(seed, nodes, levels):
    rng = np.random.default_rng(seed)
    slots, vocab = 3, 4
    trees = [random_tree(rng, nodes, levels, vocab) for _ in range(slots)]
    draws = rng.integers(0, vocab, (slots, nodes))
    array = lambda i: jnp.asarray([t[i] for t in trees], jnp.int32)
    tree = Tree(array(0), array(1), array(2), jnp.zeros((slots, nodes)), ancestors(array(1), levels))
    got = accept(tree, jnp.asarray(draws, jnp.int32), levels)
    for slot, (tokens, above, _) in enumerate(trees):
        path = [0]
        while True:
            fits = [n for n in range(nodes) if above[n] == path[-1] and tokens[n] == draws[slot, path[-1]]]
            if not fits:
                break
            path.append(fits[0])
        assert int(got.count[slot]) == len(path) - 1
        assert np.asarray(got.path[slot, : len(path)]).tolist() == path
        assert (np.asarray(got.path[slot, len(path) :]) == path[-1]).all()


def test_only_accepted_rows_reach_the_cache():
    rng = np.random.default_rng(0)
    cache = KVRows(jnp.asarray(rng.normal(size=(2, 10, 1, 4)), jnp.float32), None)
    rows = KVRows(jnp.asarray(rng.normal(size=(2, 6, 1, 4)), jnp.float32), None)
    path = jnp.asarray([[0, 2, 5, 5], [0, 3, 3, 3]], jnp.int32)
    along = KVRows(take_rows(rows.keys, path), None)
    (new,) = commit([cache], [along], jnp.asarray([4, 8], jnp.int32), jnp.asarray([3, 2], jnp.int32), rows.keys)
    want = np.asarray(cache.keys).copy()
    want[0, 4:7] = np.asarray(rows.keys)[0, [0, 2, 5]]
    want[1, 8:10] = np.asarray(rows.keys)[1, [0, 3]]
    assert np.array_equal(np.asarray(new.keys), want)


def test_rows_past_the_end_go_nowhere():
    buffer, rows = jnp.zeros((2, 5), jnp.int32), jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32)
    out = put_rows(buffer, rows, jnp.asarray([4, 0], jnp.int32), jnp.asarray([3, 0], jnp.int32))
    assert np.asarray(out).tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert np.asarray(take_rows(rows, jnp.asarray([[2, 0], [1, 1]], jnp.int32))).tolist() == [[3, 1], [5, 5]]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_append_cuts_where_plain_decoding_would_stop(data):
    length, room, count = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    emitted = data.draw(st.lists(st.integers(0, 6), min_size=4, max_size=4))
    stops = data.draw(st.sets(st.integers(0, 6), max_size=2))
    request = empty_request(1)
    request = replace(
        request,
        stop_ids=request.stop_ids.at[0, : len(stops)].set(jnp.asarray(sorted(stops), jnp.int32)),
        limit=jnp.asarray([length + room], jnp.int32),
    )
    one = lambda value: jnp.asarray([value], jnp.int32)
    empty = jnp.zeros((1, 0), jnp.int32)
    state = State(
        request, jnp.zeros((1, 16), jnp.int32), one(length), jnp.asarray([room == 0]), jnp.asarray([False]), [], [],
        empty, jnp.zeros((1, 0, 0)), one(0), one(0), jnp.zeros((1, 16), jnp.int32),
    )  # fmt: skip
    got = append(state, jnp.asarray([emitted], jnp.int32), one(count))
    made, stopped = [], False
    for token in emitted[:count]:
        if len(made) == room:
            break
        made.append(token)
        if token in stops:
            stopped = True
            break
    assert np.asarray(got.tokens[0, length : int(got.length[0])]).tolist() == made
    assert bool(got.stopped[0]) == stopped
    assert bool(got.done[0]) == (stopped or len(made) == room)
