"""The draft's rows under "auto" that wait while plain decoding runs: run when the window is full, or more wait than a tree takes along.

Nothing is written here: `loop.catch_up` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eaglejax.config import Auto
from eaglejax.models.draft import Draft
from eaglejax.models.rows import KVRows, causal_step
from eaglejax.speculation.cache import take_rows
from eaglejax.speculation.draft import best_children
from eaglejax.speculation.state import State

GUESSES = 8  # of the draft, the last ones of a window, compared with the tokens that came


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ran:
    """What the draft made of a slot's pending rows."""

    rows: list[KVRows]  # for its cache, as many as the window holds, per layer
    hidden: Float[Array, "b w d"]  # of every row, before the final norm
    right: Int[Array, " b"]  # first guesses that were the token that came
    guesses: Int[Array, " b"]  # of so many
    sure: Float[Array, "b n"]  # the draft's probability of each guess
    counted: Bool[Array, "b n"]  # the guesses there are


def follow(draft: Draft, state: State, start: Int[Array, " b"], auto: Auto) -> Ran:
    """Draft extend over the whole window. Row i says what came after row i - 1: the last guesses are compared with that."""
    count = state.pending_count
    with jax.named_scope("draft_follow"):
        tokens, step = state.pending_tokens, causal_step(start, auto.window)
        out = draft(tokens, draft.fuse(state.pending_features), step, state.draft_cache)
        guessing = jnp.maximum(count - 1, 0)  # what comes after the last row is not known yet
        rows = jnp.maximum(guessing - GUESSES, 0)[:, None] + jnp.arange(GUESSES, dtype=jnp.int32)
        inside = lambda row: jnp.minimum(row, auto.window - 1)
        # the draft's row i holds token i + 1: what it foretells stands at i + 2
        positions = start[:, None] + rows + 2
        hidden = take_rows(out.hidden, inside(rows))
        best, ids = best_children(draft, hidden, positions, state.request, auto.guess, level=1)
        foretold = draft.target_ids[...][ids[..., 0]]
        came = jnp.take_along_axis(tokens, inside(rows + 1), axis=1)
        counted = rows < guessing[:, None]
        total = lambda x: jnp.sum(x, axis=-1, dtype=jnp.int32)
        right = total(counted & (foretold == came))
        return Ran(out.rows, out.hidden, right, total(counted), jnp.exp(best[..., 0]), counted)
