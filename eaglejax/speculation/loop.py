"""EAGLE-3 decoding, top to bottom: prefill, then cycles of extend, grow, verify, accept, commit inside one `lax.while_loop`."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from eaglejax.config import Speculation
from eaglejax.models.rows import causal_step
from eaglejax.speculation.cache import commit, put_rows, take_rows
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.sampling import draw
from eaglejax.speculation.state import Models, State
from eaglejax.speculation.tree import root_only
from eaglejax.speculation.verify import accept, join_features, verify


def decode(models: Models, state: State, spec: Speculation, max_cycles: Int[Array, ""]) -> State:
    """Cycles until every slot is done, or `max_cycles` of them."""

    def running(carry):
        index, state = carry
        return (index < max_cycles) & ~jnp.all(state.done)

    def body(carry):
        index, state = carry
        return index + 1, cycle(models, state, spec)

    return lax.while_loop(running, body, (jnp.int32(0), state))[1]


def cycle(models: Models, state: State, spec: Speculation) -> State:
    """One round. Plain decoding is the same round with a tree of nothing but the root."""
    root_positions = state.length - 1
    root = jnp.take_along_axis(state.tokens, jnp.maximum(root_positions, 0)[:, None], axis=-1)[:, 0]

    # 1. draft extend: the tokens accepted last time enter the draft's cache with the target's own features
    # 2. grow: a tree of candidates below the last committed token
    draft_cache = state.draft_cache
    if spec.num_steps:
        assert models.draft is not None
        rows = root_positions - state.pending_count
        draft_cache, tip = extend(
            models.draft, draft_cache, state.pending_tokens, state.pending_features, rows, state.pending_count
        )
        tree = grow(models.draft, draft_cache, tip, root, root_positions, state.request, spec)
    else:
        tree = root_only(root)

    # 3. verify: the target draws the token after every node
    # 4. accept: follow the drawn tokens down the tree
    verdict = verify(models, state.target_cache, tree, root_positions, state.request)
    accepted = accept(tree, verdict.draws, spec.num_steps)

    # 5. commit: cache rows of the root and the accepted nodes; the tokens drawn at them (accepted ones, then the bonus)
    live = ~state.done
    kept = jnp.where(live, accepted.count + 1, 0)
    target_cache = commit(state.target_cache, verdict.rows, root_positions, kept, verdict.draws, accepted.path)
    emitted = take_rows(verdict.draws, accepted.path)
    pending = (
        (emitted, take_rows(verdict.features, accepted.path), accepted.count + 1)
        if spec.num_steps
        else (state.pending_tokens, state.pending_features, state.pending_count)
    )
    state = replace(
        state,
        target_cache=target_cache,
        draft_cache=draft_cache,
        pending_tokens=pending[0],
        pending_features=pending[1],
        # a slot that is done stays where it is: no pending row of it is run again
        pending_count=jnp.where(live, pending[2], 0),
        accepted=put_rows(state.accepted, accepted.count[:, None], state.cycles, live.astype(jnp.int32)),
        cycles=state.cycles + live.astype(jnp.int32),
    )
    return append(state, emitted, kept)


@jax.named_scope("commit")
def append(state: State, emitted: Int[Array, "b p"], count: Int[Array, " b"]) -> State:
    """Commit the first `count` emitted tokens of each slot, cut at the first EOS or stop id and at the budget."""
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    stops = jnp.any(emitted[:, :, None] == state.request.stop_ids[:, None, :], axis=-1) & (index < count[:, None])
    first_stop = jnp.where(jnp.any(stops, axis=-1), jnp.argmax(stops, axis=-1).astype(jnp.int32), emitted.shape[1])
    room = state.request.limit - state.length
    kept = jnp.minimum(jnp.minimum(count, room), first_stop + 1)
    stopped = state.stopped | (first_stop < kept)
    length = state.length + kept
    return replace(
        state,
        tokens=put_rows(state.tokens, emitted, state.length, kept),
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.request.limit),
    )


def prefill(models: Models, state: State, offset: Int[Array, ""], rows: int) -> State:
    """Run the prompt tokens at positions `offset` to `offset + rows` of every slot; slots whose prompt ends there draw their first token.

    The draft runs its own prefill on the way: row i is token x_{i+1} beside the target's features of position i. The row of the last
    prompt token waits for the token drawn after it, as the first pending row.
    """
    request = state.request
    batch = request.prompt_length.shape[0]
    tokens = lax.dynamic_slice(_padded(state.tokens, rows + 1), (0, offset), (batch, rows + 1))
    start = jnp.minimum(offset, request.prompt_length)
    count = jnp.clip(request.prompt_length - offset, 0, rows)
    with jax.named_scope("target_prefill"):
        out = models.target(tokens[:, :-1], causal_step(start, rows), state.target_cache, models.boundaries)
        state = replace(state, target_cache=commit(state.target_cache, out.rows, start, count, out.hidden))
    features = join_features(out.captured, out.hidden)
    if models.draft is not None:
        with jax.named_scope("draft_prefill"):
            draft_count = jnp.clip(request.prompt_length - 1 - offset, 0, rows)
            draft_cache, _ = extend(models.draft, state.draft_cache, tokens[:, 1:], features, start, draft_count)
            state = replace(state, draft_cache=draft_cache)

    ends = (count > 0) & (request.prompt_length <= offset + rows)
    last = jnp.maximum(count - 1, 0)[:, None]

    @jax.named_scope("first_token")
    def first_token(hidden):
        logits = models.target.logits(take_rows(hidden, last))
        return draw(logits, request.prompt_length[:, None], request, models.target.split.vocab)

    drawn = lax.cond(jnp.any(ends), first_token, lambda _: jnp.zeros((batch, 1), jnp.int32), out.hidden)
    return _start(state, drawn, take_rows(features, last), ends)


def _padded(tokens: Int[Array, "b n"], extra: int) -> Int[Array, "b m"]:
    # a slice near the end must not be moved back into the prompt
    return jnp.pad(tokens, ((0, 0), (0, extra)))


@jax.named_scope("first_token")
def _start(state: State, drawn: Int[Array, "b 1"], features, ends: Bool[Array, " b"]) -> State:
    """The first token of the slots whose prompt ended, and their first pending draft row."""
    if state.pending_tokens.shape[1]:
        one = ends.astype(jnp.int32)
        zero = jnp.zeros_like(one)
        state = replace(
            state,
            pending_tokens=put_rows(state.pending_tokens, drawn, zero, one),
            pending_features=put_rows(state.pending_features, features, zero, one),
            pending_count=jnp.where(ends, 1, state.pending_count),
        )
    state = replace(state, length=jnp.where(ends, state.request.prompt_length, state.length))
    return append(state, drawn, ends.astype(jnp.int32))
