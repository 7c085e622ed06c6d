"""Attention of tree rows over an unmasked cached prefix and a small block of step rows, merged by log-sum-exp.

The prefix needs only a length per slot; the step rows (tree nodes, prompt tokens) need a mask. Both parts run as one online softmax
(arXiv:1805.02867) in float32 that starts with the step rows, where every row sees at least itself.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from eaglejax.kernels.select import attention_form, attention_kernel, prefix_block
from eaglejax.models.rows import KVRows, Step

PRECISION = lax.Precision.HIGHEST


class _Softmax(NamedTuple):
    """Running state of an online softmax over keys."""

    top: Float[Array, "b k g t"]  # largest score so far
    total: Float[Array, "b k g t"]  # sum of exp(score - top)
    mixed: Float[Array, "b k g t cv"]  # sum of exp(score - top) * value


def tree_attention(
    queries: Float[Array, "b t h c"],
    rows: KVRows,
    cache: KVRows,
    step: Step,
    *,
    scale: float,
    value_dim: int,
    window: int | None = None,
    sinks: Float[Array, " h"] | None = None,
    block: int | None = None,
) -> Float[Array, "b t h cv"]:
    """Softmax attention of t rows over `step.lengths` cached rows and the masked step rows.

    Arguments:
        queries: after RoPE; heads h are grouped by key/value head, h = k * g.
        rows: the r step rows (earlier tree rows, then these t rows). values None: the first `value_dim` channels of the keys.
        cache: s cached rows per slot; rows at and beyond `step.lengths` are never used, whatever they hold.
        scale: multiplies the scores.
        window: a row sees keys less than `window` positions back, or all.
        sinks: a score per head that takes part in the softmax and adds nothing (gpt-oss).
        block: cached rows read at a time by the jnp form; by default the form, and this, go by device (`select`).

    Returns: [b, t, h, value_dim] in the dtype of the queries.
    """
    with jax.named_scope("attention"):
        batch, t, heads, width = queries.shape
        size = cache.keys.shape[1]
        kernel = attention_kernel() if block is None else None
        if kernel is not None:
            # imported where it is used: Pallas for GPUs takes a while to import and is not the same in older versions of jax
            if kernel == "hopper":
                from eaglejax.kernels.tree_attention_gpu import serves
                from eaglejax.kernels.tree_attention_gpu import tree_attention_gpu as ours
            else:
                from eaglejax.kernels.tree_attention_portable import serves
                from eaglejax.kernels.tree_attention_portable import tree_attention_portable as ours

            if attention_form(size, serves(queries, rows, cache, value_dim)) == "pallas":
                return ours(queries, rows, cache, step, scale=scale, value_dim=value_dim, window=window, sinks=sinks)
        kv_heads = rows.keys.shape[2]
        grouped = queries.reshape(batch, t, kv_heads, heads // kv_heads, width)
        visible = step.mask
        if window is not None:
            visible &= step.positions[:, :, None] - step.row_positions[:, None, :] < window
        state = _first(grouped, rows, visible, scale, value_dim, sinks)
        block = block or prefix_block(size) or size

        def body(index, state):
            # the last block may reach past the end: it is moved back, and rows already seen are masked out
            start = jnp.minimum(index * block, size - block)
            slots = start + jnp.arange(block)
            seen = (slots < step.lengths[:, None]) & (slots >= index * block)
            keys = lax.dynamic_slice_in_dim(cache.keys, start, block, axis=1)
            values = cache.values
            if values is not None:
                values = lax.dynamic_slice_in_dim(values, start, block, axis=1)
            mask = jnp.broadcast_to(seen[:, None, :], (batch, t, block))
            if window is not None:
                mask &= step.positions[:, :, None] - slots < window
            return _more(state, grouped, KVRows(keys, values), mask, seen, scale, value_dim)

        if 0 < size == block:
            state = body(0, state)
        elif size:
            state = lax.fori_loop(0, (jnp.max(step.lengths) + block - 1) // block, body, state)
        out = (state.mixed / state.total[..., None]).astype(queries.dtype)
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, t, heads, value_dim)


def _scores(grouped, keys, mask, scale):
    scores = jnp.einsum(
        "btkgc,bskc->bkgts",
        grouped,
        keys,
        precision=PRECISION,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(mask[:, None, None], scores * scale, -jnp.inf)


def _values(rows: KVRows, value_dim: int):
    return rows.keys[..., :value_dim] if rows.values is None else rows.values


def _mix(weights, values):
    return jnp.einsum(
        "bkgts,bskc->bkgtc",
        weights.astype(values.dtype),
        values,
        precision=PRECISION,
        preferred_element_type=jnp.float32,
    )


def _first(
    grouped: Float[Array, "b t k g c"],
    rows: KVRows,
    mask: Bool[Array, "b t r"],
    scale: float,
    value_dim: int,
    sinks: Float[Array, " h"] | None,
) -> _Softmax:
    scores = _scores(grouped, rows.keys, mask, scale)
    top = scores.max(-1)
    if sinks is None:
        weights = jnp.exp(scores - top[..., None])
        return _Softmax(top, weights.sum(-1), _mix(weights, _values(rows, value_dim)))
    sink = sinks.astype(jnp.float32).reshape(grouped.shape[2], grouped.shape[3], 1)
    top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top[..., None])
    return _Softmax(top, weights.sum(-1) + jnp.exp(sink - top), _mix(weights, _values(rows, value_dim)))


def _more(state: _Softmax, grouped, rows: KVRows, mask, seen, scale, value_dim) -> _Softmax:
    scores = _scores(grouped, rows.keys, mask, scale)
    # An unused row may hold anything, NaN included, and 0 * NaN is NaN. The barrier: a GPU's compiler would else clear the caches of all
    # layers at the start of a pass and keep every copy until its layer comes, half of the caches once more.
    top, values = lax.optimization_barrier((jnp.maximum(state.top, scores.max(-1)), _values(rows, value_dim)))
    clean = jnp.where(seen[:, :, None, None], values, 0)
    shrink = jnp.exp(state.top - top)
    weights = jnp.exp(scores - top[..., None])
    return _Softmax(
        top,
        state.total * shrink + weights.sum(-1),
        state.mixed * shrink[..., None] + _mix(weights, clean),
    )
