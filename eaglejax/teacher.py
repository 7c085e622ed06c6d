"""Teacher-forced passes of target and draft: what each says about a given text, and the tree that would grow below it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eaglejax.config import Speculation
from eaglejax.generation import DraftScore, Score
from eaglejax.models.draft import Draft
from eaglejax.models.rows import causal_step
from eaglejax.models.target import Target
from eaglejax.speculation.draft import extend, grow
from eaglejax.speculation.programs import empty_request, teacher_bucket, token_row
from eaglejax.speculation.tree import Tree
from eaglejax.speculation.verify import join_features


def score(target: Target, token_ids: list[int]) -> Score:
    """Logits [t, v] and all boundaries [t, d] of the target over the tokens."""
    count = len(token_ids)
    logits, boundaries = _score(target, token_row(token_ids, teacher_bucket(count)))
    return Score(
        np.asarray(logits[0, :count]), {b: np.asarray(x[0, :count], np.float32) for b, x in enumerate(boundaries)}
    )


def draft_score(target: Target, draft: Draft, boundaries: tuple[int, ...], token_ids: list[int]) -> DraftScore:
    """Logits [t - 1, w] and hidden states [t - 1, d] of the draft: row i has token i + 1 and the features of position i."""
    count = len(token_ids) - 1
    hidden, logits, _ = _draft_score(target, draft, boundaries, token_row(token_ids, teacher_bucket(count) + 1))
    return DraftScore(np.asarray(logits[0, :count]), np.asarray(hidden[0, :count], np.float32))


def propose(target: Target, draft: Draft, boundaries: tuple[int, ...], token_ids: list[int], spec: Speculation) -> Tree:
    """The tree below the last token, at temperature 0."""
    count = len(token_ids) - 1
    tokens = token_row(token_ids, teacher_bucket(count) + 1)
    return _propose(target, draft, boundaries, tokens, jnp.asarray([count], jnp.int32), spec)


def first_token_accuracy(target: Target, draft: Draft, boundaries: tuple[int, ...], texts: list[list[int]]) -> float:
    """Share of positions at which the draft's first choice is the target's: how often a chain's first token would be accepted."""
    right = total = 0
    for token_ids in texts:
        count = len(token_ids) - 1
        tokens = token_row(token_ids, teacher_bucket(count) + 1)
        _, logits, choices = _draft_score(target, draft, boundaries, tokens)
        drafted = np.asarray(draft.target_ids[...])[np.asarray(logits[0, :count]).argmax(-1)]
        # draft row i stands beside token i + 1 and foretells what the target says there
        wanted = np.asarray(choices[0, 1 : count + 1])
        right, total = right + int((drafted == wanted).sum()), total + count
    return right / max(total, 1)


def _full_pass(target: Target, tokens: Int[Array, "b t"], boundaries: tuple[int, ...]):
    step = causal_step(jnp.zeros((tokens.shape[0],), jnp.int32), tokens.shape[1])
    return target(tokens, step, target.empty_caches(tokens.shape[0], 0), boundaries)


@nnx.jit
def _score(target: Target, tokens: Int[Array, "b t"]):
    out = _full_pass(target, tokens, tuple(range(target.config.num_layers + 1)))
    return target.logits(out.hidden), out.captured


@nnx.jit(static_argnames="boundaries")
def _draft_score(target: Target, draft: Draft, boundaries: tuple[int, ...], tokens: Int[Array, "b t"]):
    out = _full_pass(target, tokens, boundaries)
    features = join_features(out.captured, out.hidden)
    rows = tokens.shape[1] - 1
    step = causal_step(jnp.zeros((tokens.shape[0],), jnp.int32), rows)
    drafted = draft(tokens[:, 1:], draft.fuse(features[:, :-1]), step, draft.empty_caches(tokens.shape[0], 0))
    choices = jnp.argmax(target.logits(out.hidden), axis=-1)
    return drafted.hidden, draft.logits(drafted.hidden), choices


@nnx.jit(static_argnames=("boundaries", "spec"))
def _propose(
    target: Target,
    draft: Draft,
    boundaries: tuple[int, ...],
    tokens: Int[Array, "b t"],
    count: Int[Array, " b"],
    spec: Speculation,
) -> Tree:
    out = _full_pass(target, tokens[:, :-1], boundaries)
    features: Float[Array, "b t f"] = join_features(out.captured, out.hidden)
    zero = jnp.zeros_like(count)
    cache = draft.empty_caches(tokens.shape[0], tokens.shape[1])
    cache, tip = extend(draft, cache, tokens[:, 1:], features, zero, count)
    root = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]
    return grow(draft, cache, tip, root, count, empty_request(tokens.shape[0]), spec)
