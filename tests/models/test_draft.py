"""The draft against the values of the EAGLE reference, and against itself: whole sequences, steps and levels give the
same.
"""

import jax
import jax.numpy as jnp
import kit_m
import numpy as np
import pytest
from draft_runs import compiled, from_scratch, fuse, teacher
from flax import nnx
from safetensors.numpy import load_file

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.load_report import LoadReport
from eaglejax.models.draft import Draft
from eaglejax.models.rows import KVRows, Step, causal_step

GOLDEN = ["draft_eagle3", "draft_eagle3_own_embed"]


def zero():
    return jnp.zeros((1,), jnp.int32)


def load(folder, **kw) -> Draft:
    embedding = folder / "embed.safetensors"
    if embedding.exists():
        kw["target_embedding"] = load_file(embedding)["model.embed_tokens.weight"]
    return read_draft(folder, dtype="float32", report=LoadReport(), **kw).draft


@pytest.fixture(params=GOLDEN)
def case(request, data):
    folder = data / "drafts" / request.param
    return load(folder), load_file(folder / "expected.safetensors")


def close(found, expected, atol=1e-4):
    np.testing.assert_allclose(np.asarray(found), expected, atol=atol, rtol=0)


def test_reference_values(case):
    draft, expected = case
    fused, out, logits = from_scratch(draft, expected["aux_hidden"], expected["input_ids"][:, 1:])
    close(fused, expected["fc_out"])
    close(out.hidden, expected["draft_hidden"])
    close(logits, expected["draft_logits"])
    assert logits.dtype == jnp.float32
    rows = out.rows[0]
    close(rows.keys.transpose(0, 2, 1, 3), expected["draft_keys"])
    close(rows.values.transpose(0, 2, 1, 3), expected["draft_values"])
    np.testing.assert_array_equal(out.feedback, out.hidden)


def test_target_ids_are_absolute(data):
    for name in GOLDEN:
        stored = load_file(data / "drafts" / name / "model.safetensors")
        ids = np.asarray(load(data / "drafts" / name).target_ids[...])
        np.testing.assert_array_equal(ids, np.flatnonzero(stored["t2d"]))
        assert ids.dtype == np.int32


def write(cache: KVRows, own: KVRows, start: int) -> KVRows:
    place = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 1)
    assert cache.values is not None and own.values is not None
    return KVRows(place(cache.keys, own.keys), place(cache.values, own.values))


def test_step_by_step_is_the_whole_sequence(case):
    """Row i pairs token i + 1 with the state of position i and stands at position i, however many rows a call takes."""
    draft, expected = case
    tokens = jnp.asarray(expected["input_ids"][:, 1:], jnp.int32)
    fused, run = fuse(draft, expected["aux_hidden"]), compiled(draft)
    # what lies beyond the length must not matter
    caches = [jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cache) for cache in draft.empty_caches(1, 32)]
    start = 0
    for count in (3, 1, 1, 1, tokens.shape[1] - 6):
        span = slice(start, start + count)
        out, logits = run(tokens[:, span], fused[:, span], causal_step(jnp.asarray([start], jnp.int32), count), caches)
        close(logits, expected["draft_logits"][:, span])
        close(out.hidden, expected["draft_hidden"][:, span], 1e-5)
        caches = [write(cache, own, start) for cache, own in zip(caches, out.rows, strict=True)]
        start += count


def test_levels_of_a_tree_are_a_chain(case):
    """Drafting deeper with `earlier` rows gives what rows in the cache give; one position further on does not."""
    draft, expected = case
    tokens = jnp.asarray(expected["input_ids"][:, 1:], jnp.int32)
    n, run = tokens.shape[1], compiled(draft)
    _, first, _ = from_scratch(draft, expected["aux_hidden"], tokens)
    cache = [write(c, own, 0) for c, own in zip(draft.empty_caches(1, 32), first.rows, strict=True)]
    chain, levels, shifted = cache, None, None
    parent = level_parent = first.feedback[:, -1:]
    for depth in range(3):
        token = jnp.asarray([[7 + depth]], jnp.int32)
        at = jnp.asarray([[n + depth]], jnp.int32)
        out, right = run(token, parent, causal_step(at[0], 1), chain)
        chain = [write(c, own, n + depth) for c, own in zip(chain, out.rows, strict=True)]
        where = n + jnp.arange(depth + 1, dtype=jnp.int32)[None]
        step = Step(at, jnp.ones((1, 1, depth + 1), bool), where, jnp.asarray([n], jnp.int32))
        level, logits = run(token, level_parent, step, cache, levels)
        close(logits, np.asarray(right), 1e-5)
        late = Step(at + 1, step.mask, where + 1, step.lengths)
        shifted, _ = run(token, level_parent, late, cache, levels)
        join = lambda old, new: jnp.concatenate((old, new), axis=1)
        levels = level.rows if levels is None else jax.tree.map(join, levels, level.rows)
        parent, level_parent = out.feedback, level.feedback
    assert shifted is not None
    assert np.abs(np.asarray(shifted.hidden - parent)).max() > 1e-3


@pytest.fixture(scope="module")
def markov(tmp_path_factory):
    rng = np.random.default_rng(7)
    p, q = rng.dirichlet(np.ones(64), 64), rng.dirichlet(np.ones(64), 64)
    folder = tmp_path_factory.mktemp("markov")
    target = load_target(kit_m.write_target(folder / "target", p, tokenizer=False), dtype="float32")
    return folder, target, q


@pytest.fixture(scope="module")
def streams(markov):
    """Every boundary of the target over 40 random tokens."""
    target = markov[1]
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 64, (1, 40)), jnp.int32)
    graph, arrays = nnx.split(target)

    @jax.jit
    def run(arrays):
        module = nnx.merge(graph, arrays)
        return module(tokens, causal_step(zero(), 40), module.empty_caches(1, 0), tuple(range(9))).captured

    return tokens, run(arrays)


def test_markov_pair_and_wrong_boundaries(markov, streams):
    """The right captures give Q's rows; each wrong one gives garbage. The planted fault of every off-by-one."""
    folder, target, q = markov
    loaded = read_draft(
        kit_m.write_draft(folder / "draft", q), dtype="float32", target=target, report=(report := LoadReport())
    )
    draft, (tokens, captured) = loaded.draft, streams
    assert loaded.capture.boundaries == (2, 4, 5) and "[2, 4, 5]" in str(report)
    expected = q[np.asarray(tokens[0, 1:])]

    forced = teacher(draft)

    def teacher_forced(boundaries):
        features = jnp.concatenate([captured[b] for b in boundaries], axis=-1)[:, :-1]
        _, out, logits = forced(features, tokens[:, 1:])
        return out, jax.nn.softmax(logits[0])

    answer, right = teacher_forced(loaded.capture.boundaries)
    close(right, expected, 5e-5)
    for wrong in [(1, 4, 5), (3, 4, 5), (2, 3, 5), (2, 5, 5), (2, 4, 4), (2, 4, 6), (1, 3, 4), (3, 5, 6)]:
        _, found = teacher_forced(wrong)
        assert np.abs(np.asarray(found) - expected).max(-1).min() > 0.02, wrong
    # fed its own state the draft is right at every depth
    feedback, position, run = answer.feedback[:, -1:], 39, compiled(draft)
    caches = [write(c, own, 0) for c, own in zip(draft.empty_caches(1, 64), answer.rows, strict=True)]
    for depth in range(5):
        token = jnp.asarray([[11 * depth + 2]], jnp.int32)
        out, logits = run(token, feedback, causal_step(jnp.asarray([position + depth], jnp.int32), 1), caches)
        close(jax.nn.softmax(logits[0, 0]), q[11 * depth + 2], 5e-5)
        caches = [write(c, own, position + depth) for c, own in zip(caches, out.rows, strict=True)]
        feedback = out.feedback


def test_borrowed_arrays_are_the_targets_own(markov):
    folder, target, q = markov
    draft = read_draft(kit_m.write_draft(folder / "lent", q), dtype="float32", target=target, report=LoadReport()).draft
    assert draft.embedding.weight[...] is target.embedding.weight[...]
    assert draft.head.weight[...] is not target.head.weight[...]


def test_window_of_a_tree_row(markov):
    """A sliding window counts positions, not slots: a row deep in a tree drops the far rows of the prefix."""
    folder, target, q = markov
    rng = np.random.default_rng(5)
    wide = {k: rng.normal(0, 0.1, v.shape).astype(np.float32) for k, v in kit_m.draft_tensors(q, (2, 4, 5)).items()}
    narrow = kit_m.write_draft(folder / "narrow", q, tensors=wide, sliding_window=3, use_sliding_window=True)
    full = kit_m.write_draft(folder / "full", q, tensors=wide)
    drafts = [read_draft(f, dtype="float32", target=target, report=LoadReport()).draft for f in (narrow, full)]
    assert drafts[0].config.layers[0].attention.window == 3 and drafts[1].config.layers[0].attention.window is None
    tokens, hidden = (
        jnp.asarray([[5, 6, 7, 8, 9, 10]], jnp.int32),
        jnp.asarray(rng.normal(0, 1, (1, 6, 128)), jnp.float32),
    )
    windowed = compiled(drafts[0])(tokens, hidden, causal_step(zero(), 6), drafts[0].empty_caches(1, 0))[0].hidden
    whole = compiled(drafts[1])(tokens, hidden, causal_step(zero(), 6), drafts[1].empty_caches(1, 0))[0].hidden
    # with a window of 3, row 5 sees rows 3, 4, 5: it is the last row of a sequence that starts at position 3
    late = causal_step(zero(), 3)
    late = Step(late.positions + 3, late.mask, late.row_positions + 3, zero())
    alone, _ = compiled(drafts[1])(tokens[:, 3:], hidden[:, 3:], late, drafts[1].empty_caches(1, 0))
    close(windowed[:, 5], np.asarray(alone.hidden[:, 2]), 1e-5)
    assert np.abs(np.asarray(whole[:, 5] - alone.hidden[:, 2])).max() > 1e-4
