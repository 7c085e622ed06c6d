"""The draft's side of a cycle: extend over the accepted tokens, then grow a tree level by level."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eaglejax.config import Speculation
from eaglejax.models.draft import Draft, DraftOutput
from eaglejax.models.rows import KVRows, Step, causal_step
from eaglejax.models.split import Over
from eaglejax.speculation.cache import commit, take_rows
from eaglejax.speculation.sampling import gumbel_at
from eaglejax.speculation.state import Request
from eaglejax.speculation.tree import Pool, Tree, rerank


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tip:
    """The draft's last true row, from which the next tree grows: the root token beside the target's features before it."""

    hidden: Float[Array, "b d"]  # before the final norm
    feedback: Float[Array, "b d"]  # what the first drafted rows are fed
    rows: Int[Array, " b"]  # rows in the draft's cache, the tip included; it stands at position rows - 1


def extend(
    draft: Draft,
    cache: list[KVRows],
    tokens: Int[Array, "b p"],
    features: Float[Array, "b p f"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> tuple[list[KVRows], Tip]:
    """Run the draft over `count` rows (token x_{i+1} with the target's features of position i) that stand right after `start` rows.

    Rows made of the draft's own states are never kept: the cache holds rows of target features only.
    """
    with jax.named_scope("draft_extend"):
        out = draft(tokens, draft.fuse(features), causal_step(start, tokens.shape[1]), cache)
        return commit(cache, out.rows, start, count, out.hidden), tip_of(out, start, count)


def tip_of(out: DraftOutput, start: Int[Array, " b"], count: Int[Array, " b"]) -> Tip:
    """The last of `count` rows that stand after `start` others."""
    last = jnp.maximum(count - 1, 0)[:, None]
    return Tip(
        hidden=take_rows(out.hidden, last)[:, 0], feedback=take_rows(out.feedback, last)[:, 0], rows=start + count
    )


def grow(
    draft: Draft,
    cache: list[KVRows],
    tip: Tip,
    root: Int[Array, " b"],
    root_positions: Int[Array, " b"],
    request: Request,
    spec: Speculation,
) -> Tree:
    """A tree of `spec.nodes` nodes below `root`, which stands at absolute position `root_positions`.

    Level 1 comes from the tip. Each further level runs the K best nodes of the level before it: their tokens beside the state of
    their parents, over the true prefix and exactly their own ancestors. All their candidates stay in the pool.
    """
    topk = spec.topk
    batch = root.shape[0]
    with jax.named_scope("draft_step_1"):
        best = best_children(draft, tip.hidden[:, None], root_positions[:, None] + 1, request, spec, level=1)
        scores, ids = best[0][:, 0], best[1][:, 0]
    tokens = draft.target_ids[...][ids]
    pool = Pool(tokens, scores, jnp.full_like(tokens, -1), jnp.full((topk,), 1, jnp.int32))

    feedback = jnp.broadcast_to(tip.feedback[:, None], (batch, topk, tip.feedback.shape[-1]))
    sees: Bool[Array, "b k r"] = jnp.zeros((batch, topk, 0), bool)
    earlier: list[KVRows] | None = None
    first = 0  # pool index of the frontier's level
    frontier = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), (batch, topk))  # pool index of each frontier node
    for level in range(2, spec.num_steps + 1):
        with jax.named_scope(f"draft_step_{level}"):
            self_mask = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch, topk, topk))
            sees = jnp.concatenate([sees, self_mask], axis=-1)
            step = _level_step(tip.rows, sees, level, topk)
            out = draft(tokens, feedback, step, cache, earlier)
            earlier = out.rows if earlier is None else jax.tree.map(_join_rows, earlier, out.rows)
            child_scores, child_ids = best_children(
                draft, out.hidden, root_positions[:, None] + level, request, spec, level
            )
            total = (scores[..., None] + child_scores).reshape(batch, topk * topk)
            child_tokens = draft.target_ids[...][child_ids].reshape(batch, topk * topk)
            first += topk if level == 2 else topk * topk
            pool = pool.extended(
                Pool(
                    child_tokens,
                    total,
                    jnp.repeat(frontier, topk, axis=-1),
                    jnp.full((topk * topk,), level, jnp.int32),
                )
            )
            # the frontier of the next level: the K best children, each fed its parent's state
            scores, best = lax.top_k(total, topk)
            tokens = jnp.take_along_axis(child_tokens, best, axis=-1)
            parent = best // topk
            feedback = take_rows(out.feedback, parent)
            sees = take_rows(sees, parent)
            frontier = first + best.astype(jnp.int32)
    return rerank(root, pool, spec.nodes, spec.num_steps)


def _join_rows(earlier, new):
    return jnp.concatenate([earlier, new], axis=1)


def _level_step(tip_rows: Int[Array, " b"], sees: Bool[Array, "b k r"], level: int, topk: int) -> Step:
    """Positions and masks of the rows that grow `level`: a node of depth j stands right after the tip's position plus j - 1."""
    depths = jnp.repeat(jnp.arange(level - 1, dtype=jnp.int32), topk)
    row_positions = tip_rows[:, None] + depths
    return Step(row_positions[:, -topk:], sees, row_positions, tip_rows)


def best_children(
    draft: Draft,
    hidden: Float[Array, "b k d"],
    positions: Int[Array, "b #k"],
    request: Request,
    spec: Speculation,
    level: int,
) -> tuple[Float[Array, "b k c"], Int[Array, "b k c"]]:
    """The `spec.topk` best children of every row: what each adds to its parent's score, and its draft id, best first.

    A child adds a log-probability over the draft vocabulary, at most 0; NaN counts as impossible; ties go to the lower id.

    Greedy slots: log_softmax(logits). Sampling slots, when coupled: log_softmax((logits / T + g) / c), with the noise g that the target
    will draw with at the child's position.
    """
    logits = draft.logits(hidden) / jnp.float32(spec.temperature_of(level))
    over = draft.split.draft_vocab
    first = over.first(logits.shape[-1])

    def coupled(logits):
        hot = (request.temperature > 0)[:, None, None]
        ids = lax.dynamic_slice_in_dim(draft.target_ids[...], first, logits.shape[-1])
        noise = gumbel_at(request.seed, positions, ids)
        mixed = (
            logits / jnp.where(hot, jnp.maximum(request.temperature[:, None, None], 1e-30), 1) + noise
        ) / spec.coupling
        return jnp.where(hot, mixed, logits)

    if spec.coupled:
        logits = lax.cond(jnp.any(request.temperature > 0), coupled, lambda x: x, logits)
    if over.axis is None:
        best, ids = lax.top_k(_possible(jax.nn.log_softmax(logits, axis=-1)), spec.topk)
        return best, ids
    return _best_of_parts(logits, first, over, spec.topk)


def sureness(
    draft: Draft, tip: Tip, root_positions: Int[Array, " b"], request: Request, guess: Speculation
) -> Float[Array, " b"]:
    """The draft's probability of its best token after the root, scored as `guess` says."""
    best, _ = best_children(draft, tip.hidden[:, None], root_positions[:, None] + 1, request, guess, level=1)
    return jnp.exp(best[:, 0, 0])


def _possible(increments: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.where(jnp.isnan(increments), -jnp.inf, increments)


def _best_of_parts(logits: Float[Array, "b k w"], first, over: Over, topk: int):
    """The best children where each device scores its part of the draft vocabulary; one gather of a few numbers per row."""
    top = logits.max(-1, keepdims=True)
    total = jnp.exp(logits - top).sum(-1, keepdims=True)
    best, ids = lax.top_k(_possible(logits), min(topk, logits.shape[-1]))
    # one gather for all; as integers, which no device flushes to zero
    floats = lax.bitcast_convert_type(jnp.concatenate([top, total, best], axis=-1), jnp.int32)
    offers = over.gather(jnp.concatenate([floats, ids + first], axis=-1))
    kept = best.shape[-1]
    floats, ids = lax.bitcast_convert_type(offers[..., : 2 + kept], jnp.float32), offers[..., 2 + kept :]
    top, total = floats[..., 0], floats[..., 1]
    highest = top.max(0)
    total = (total * jnp.exp(top - highest)).sum(0)
    # parts one after the other are in ascending order of id among equals
    in_a_row = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
    scores, places = lax.top_k(in_a_row(floats[..., 2:]), topk)
    scores = scores - highest[..., None] - jnp.log(total)[..., None]
    return _possible(scores), jnp.take_along_axis(in_a_row(ids), places, axis=-1)
