"""Training-time test (EAGLE-3, arXiv:2503.01840): the draft is unrolled over its own states, as it runs when it drafts.

    step 0 : row i reads token i + 1 beside fc(captures of position i) and foretells token i + 2
    step j : row i reads token i + 1 + j beside its own state of step j - 1, foretells token i + 2 + j

Tokens are the true ones, states the draft's own; row i of step j stands at RoPE position i + j. Row i sees the
step-0 keys of rows 0..i, and of the later steps only its own place: a chain of length j grown at every position at
once. Each step is recomputed in the backward pass, so that no step's scores are kept; logits are `losses.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.block import Block
from eaglejax.models.draft import Draft
from eaglejax.models.layers import PRECISION
from eaglejax.models.rope import rotate
from eaglejax.models.rows import KVRows
from eaglejax.training.losses import CHUNK, Objective, vocabulary_loss
from eaglejax.training.products import wide_einsum

QUERIES = 128  # places whose attention scores exist at a time
VOCABULARY_CHUNK = 8192  # target logits held at a time while the best token is looked for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Text:
    """Token rows to train on, one or more documents per row.

    segments: number of the document each place belongs to; places see their own document only.
    positions: place within the document. loss: places i where the target's word after token i + 1 counts, see `ttt`.
    """

    tokens: Int[Array, "b t"] | Int[np.ndarray, "b t"]
    positions: Int[Array, "b t"] | Int[np.ndarray, "b t"]
    segments: Int[Array, "b t"] | Int[np.ndarray, "b t"]
    loss: Bool[Array, "b t"] | Bool[np.ndarray, "b t"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Teacher:
    """What the target says at each place, over the draft's vocabulary.

    probabilities: softmax over the draft vocabulary alone. best: draft id of the likeliest.
    known: whether the draft vocabulary holds the likeliest token of the whole vocabulary.
    """

    probabilities: Float[Array, "b t w"]
    best: Int[Array, "b t"]
    known: Bool[Array, "b t"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unrolled:
    """Per step: loss, places whose first choice is the teacher's, places with loss, and what each row drafts."""

    losses: Float[Array, " steps"]
    correct: Float[Array, " steps"]
    places: Float[Array, " steps"]
    drafted: Int[Array, "steps b t"]  # target id of the first choice


def teach(last_hidden: Float[Array, "b t d"], head: Float[Array, "v d"], target_ids: Int[Array, " w"]) -> Teacher:
    """The teacher from the target's last hidden state (after its final norm) and its output matrix.

    The whole vocabulary is gone through in chunks: only the running best is kept of it.
    """
    with jax.named_scope("teacher"):
        size = head.shape[0]
        chunk = min(VOCABULARY_CHUNK, size)
        known_ids = jnp.zeros((size,), bool).at[target_ids].set(True)

        def body(index, state):
            top, best = state
            start = jnp.minimum(index * chunk, size - chunk)  # the last chunk overlaps: equal scores keep the lower id
            logits = _logits(last_hidden, lax.dynamic_slice_in_dim(head, start, chunk))
            here = logits.max(-1)
            better = here > top
            return jnp.where(better, here, top), jnp.where(better, start + jnp.argmax(logits, -1), best)

        shape = last_hidden.shape[:2]
        start = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32))
        _, best = lax.fori_loop(0, -(-size // chunk), body, start)
        probabilities, favourite = _restricted(last_hidden, head[target_ids])
        return Teacher(probabilities, favourite, known_ids[best])


def _restricted(last_hidden, rows):
    """Softmax over the draft vocabulary alone, in the dtype of the states, and the likeliest; a few places at a time."""
    batch, size, width = last_hidden.shape
    places = batch * size
    parts = -(-places // max(1, CHUNK // rows.shape[0]))
    chunk = -(-places // parts)
    flat = jnp.pad(last_hidden.reshape(places, width), ((0, parts * chunk - places), (0, 0)))

    def one(hidden):
        logits = _logits(hidden[None], rows)[0]
        return jax.nn.softmax(logits, axis=-1).astype(hidden.dtype), jnp.argmax(logits, -1).astype(jnp.int32)

    soft, best = lax.map(one, flat.reshape(parts, chunk, width))
    whole = lambda x: x.reshape(parts * chunk, *x.shape[2:])[:places].reshape(batch, size, *x.shape[2:])
    return whole(soft), whole(best)


def _logits(hidden, weight):
    return jnp.einsum("btd,vd->btv", hidden, weight, precision=PRECISION, preferred_element_type=jnp.float32)


class Sight(NamedTuple):
    """A place sees the step-0 rows of its own segment whose order is not above its own."""

    segments: Int[Array, "b t"]
    order: Int[Array, "b t"]


class _Shifted(NamedTuple):
    """One array of the batch with room for the shifts of all steps behind it: step j reads places j .. j + t - 1."""

    padded: Shaped[Array, "..."]
    size: int

    def at(self, step: int) -> Shaped[Array, "..."]:
        return lax.slice_in_dim(self.padded, step, step + self.size, axis=1)


def _shifted(
    x: Shaped[Array, "b t ..."] | Shaped[np.ndarray, "b t ..."], room: int, fill: float | int | bool = 0
) -> _Shifted:
    tail = jnp.full((x.shape[0], room, *x.shape[2:]), fill, x.dtype)
    return _Shifted(jnp.concatenate([jnp.asarray(x), tail], axis=1), x.shape[1])


def ttt(
    draft: Draft,
    text: Text,
    features: Float[Array, "b t n"],
    teacher: Teacher,
    steps: int,
    objective: Objective = "entropy",
) -> Unrolled:
    """The unrolled losses of a draft with grouped-query attention; differentiable in the draft's parameters.

    Arguments:
        features: the captured target states of each place, joined low to high (`Draft.fuse` is applied here).
        teacher: the target's word at each place; nothing is shifted beforehand.
        steps: how many tokens are drafted at every place.
        objective: the loss of a place, see `losses.vocabulary_loss`; "reached" weighs each place at step j by the chance that
            the draft's steps before j are accepted there, the product of their sums of min(p, q), as drafting does.

    `Unrolled.losses[j]` is the objective's loss, weighed where it is "reached", summed over the places that count, divided by ALL places,
    b * t.
    Place i counts at step j where `text.loss` is on at i + j, the target's best token after i + 1 + j is in the
    draft vocabulary, and both places lie in one document. A borrowed head has no gradient.
    """
    batch, size = text.tokens.shape
    flat_soft = teacher.probabilities.reshape(batch * size, -1)
    after_end = jnp.any(draft.target_ids[...] == 0)  # beyond the end the teacher is uniform, its best token id 0
    tokens, segments = _shifted(text.tokens, steps + 1), _shifted(text.segments, steps + 1, -1)
    teachers = _shifted(jnp.arange(batch * size, dtype=jnp.int32).reshape(batch, size), steps + 1, -1)
    best = _shifted(teacher.best, steps + 1)
    known = jnp.concatenate([teacher.known[:, 1:], jnp.broadcast_to(after_end, (batch, 1))], axis=1)
    loss, counts = _shifted(text.loss, steps), _shifted(text.loss & known, steps)
    order = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    sight = Sight(jnp.asarray(text.segments), order)

    @partial(jax.checkpoint, static_argnums=(0,))
    def one(step, hidden, memories):
        out, rows = _forward(draft, tokens.at(step + 1), hidden, text.positions + step, memories, sight)
        normed = out if draft.norm is None else draft.norm(out)
        return out, normed, rows

    def judge(step, normed, reach):
        same = segments.at(step) == text.segments
        wanted = counts.at(step) & same
        flat = lambda x: x.reshape(wanted.size, *x.shape[2:])
        total, choices, each = vocabulary_loss(
            flat(normed),
            draft.head.weight[...],
            flat_soft,
            flat(teachers.at(step + 1)),
            flat(wanted),
            flat(reach),
            objective=objective,
            learn_head=draft.config.own_head,
        )
        choice = choices.reshape(wanted.shape)
        if objective == "reached":  # a place whose word the draft cannot say ends its chain
            reach = reach * jnp.where(wanted, jnp.exp(-lax.stop_gradient(each.reshape(wanted.shape))), 0)
        return reach, (
            total / wanted.size,
            jnp.sum(wanted & (choice == best.at(step + 1))).astype(jnp.float32),
            jnp.sum(loss.at(step) & same).astype(jnp.float32),
            draft.target_ids[...][choice],
        )

    hidden = draft.fuse(features)
    memories: list[list[KVRows]] = [[] for _ in draft.config.layers]
    figures, reach = [], jnp.ones(text.tokens.shape, jnp.float32)
    for step in range(steps):
        with jax.named_scope(f"unroll_{step}"):
            out, normed, rows = one(step, hidden, memories)
            hidden = normed if draft.config.norm_output else out
            memories = [[*memory, own] for memory, own in zip(memories, rows, strict=True)]
            reach, told = judge(step, normed, reach)
            figures.append(told)
    return Unrolled(*(jnp.stack(column) for column in zip(*figures, strict=True)))


def causal_within(segments: Int[Array, "b t"] | Int[np.ndarray, "b t"]) -> Bool[Array, "b t t"]:
    """Each place sees the places of its own document up to itself."""
    size, segments = segments.shape[1], jnp.asarray(segments)
    return (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))


def _forward(draft: Draft, tokens, hidden, positions, memories, sight: Sight):
    """The draft's layers as in `Draft.__call__`, with the unroll's attention: stream, and own rows per layer."""
    first = draft.first
    embedded = draft.embedding(tokens).astype(draft.dtype)
    if first.input_norm is not None:
        embedded = first.input_norm(embedded)
    hidden = hidden.astype(draft.dtype)
    normed = hidden if first.hidden_norm is None else first.hidden_norm(hidden)
    stream = normed if first.norm_before_residual else hidden
    mixed, own = _attend(first.attention, jnp.concatenate([embedded, normed], -1), positions, memories[0], sight)
    stream = stream + mixed
    stream = stream + first.mlp(first.post_norm(stream))
    rows = [own]
    for block, memory in zip(draft.others, memories[1:], strict=True):
        assert isinstance(block, Block)
        mixed, own = _attend(block.attention, block.input_norm(stream), positions, memory, sight)
        stream = stream + mixed
        stream = stream + block.mlp(block.post_norm(stream))
        rows.append(own)
    return stream, rows


def _attend(attention, x, positions, memory: list[KVRows], sight: Sight):
    """Attention over the step-0 keys in `sight`, and over the own place in every later step."""
    assert isinstance(attention, GroupedQueryAttention)
    config, (batch, size, _) = attention.config, x.shape
    queries = attention.q(x).reshape(batch, size, config.heads, config.head_dim)
    both = attention.kv(x).reshape(batch, size, 2, config.kv_heads, config.head_dim)
    keys, values = both[:, :, 0], both[:, :, 1]
    if attention.q_norm is not None and attention.k_norm is not None:
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    own = KVRows(rotate(keys, positions, config.rope), values)
    grouped = rotate(queries, positions, config.rope).reshape(batch, size, config.kv_heads, -1, config.head_dim)
    first, *later = [*memory, own]
    mixed = _blocks(grouped, first, later, sight, positions, config.window)
    return attention.out(mixed.astype(x.dtype).reshape(batch, size, -1)), own


def _blocks(grouped, first: KVRows, later: list[KVRows], sight: Sight, positions, window):
    """Attention of a block of queries at a time, each recomputed in the backward pass: no t x t scores exist, and what
    does exist grows with the length alone. Returns [b, t, k, g, c] float32."""
    batch, size = positions.shape
    parts = -(-size // QUERIES)
    keys, values = first.keys, _values(first)

    def one(part):
        queries, at, segments, order, *own = part
        seen = (segments[:, :, None] == sight.segments[:, None, :]) & (order[:, :, None] >= sight.order[:, None, :])
        if window is not None:
            seen = seen & (at[:, :, None] - (positions - len(later))[:, None, :] < window)
        scale = queries.shape[-1] ** -0.5
        scores = wide_einsum("btkgc,bskc->bkgts", queries, keys) * scale
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        places = [jnp.einsum("btkgc,btkc->bkgt", *_wide(queries, k)) * scale for k in own[: len(later)]]
        top = scores.max(-1)
        for place in places:
            top = jnp.maximum(top, place)
        top = lax.stop_gradient(top)
        weights = jnp.exp(scores - top[..., None])
        total = weights.sum(-1)
        mixed = wide_einsum("bkgts,bskc->bkgtc", weights.astype(values.dtype), values)
        for place, v in zip(places, own[len(later) :], strict=True):
            weight = jnp.exp(place - top)
            total = total + weight
            mixed = mixed + weight[..., None] * v.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]
        return (mixed / total[..., None]).transpose(0, 3, 1, 2, 4)

    given = [grouped, positions, sight.segments, sight.order]
    given += [rows.keys for rows in later] + [_values(rows) for rows in later]
    if parts == 1:
        return one(given)

    def cut(x):
        # places behind the end repeat the last, so that each sees something; their results are dropped
        padded = jnp.pad(x, [(0, 0), (0, parts * QUERIES - size), *[(0, 0)] * (x.ndim - 2)], mode="edge")
        return jnp.moveaxis(padded.reshape(batch, parts, QUERIES, *x.shape[2:]), 1, 0)

    mixed = jnp.moveaxis(lax.map(jax.checkpoint(one), [cut(x) for x in given]), 0, 1)
    return mixed.reshape(batch, parts * QUERIES, *mixed.shape[3:])[:, :size]


def _values(rows: KVRows) -> Array:
    assert rows.values is not None, "latent attention is refused before"
    return rows.values


def _wide(*arrays):
    return tuple(array.astype(jnp.float32) for array in arrays)
