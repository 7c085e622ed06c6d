"""Problems of tree attention, their answers in float64, and arguments to trace with, for the tests of its kernels."""

import jax.numpy as jnp
import numpy as np

from eaglejax.models.rows import KVRows, Step


def problem(lengths, size, rows, heads, widths=(128, 128), sinks=False, seen=None, dtype=jnp.bfloat16, **_):
    """Inputs in float32, of values that `dtype` has, and a random tree in every slot.

    Arguments:
        lengths: of the slots. size: cached rows of each.
        rows: own rows, and earlier ones, which are there to be seen. seen: of the own rows the first ones only.
        heads: of keys and values, and queries for each.
        widths: of keys and values, which are None for the first 512 channels of the keys.
    """
    rng = np.random.default_rng(len(lengths) + size)
    width, values = widths
    value_dim = 512 if values is None else values
    (own, earlier), (kv_heads, group), batch = rows, heads, len(lengths)
    draw = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32))
    pair = lambda n: (
        draw(batch, n, kv_heads, width),
        None if values is None else draw(batch, n, kv_heads, values),
    )
    total = own + earlier
    ancestors = np.zeros((batch, total, total), bool)
    for slot, row in np.ndindex(batch, total):
        if row:
            ancestors[slot, row] = ancestors[slot, rng.integers(0, row)]
        ancestors[slot, row, row] = True
    row_positions = np.asarray(lengths)[:, None] + ancestors.sum(-1) - 1
    kept = slice(earlier, earlier + (seen or own))
    return dict(
        queries=draw(batch, seen or own, kv_heads * group, width),
        rows=pair(total),
        cache=pair(size),
        mask=ancestors[:, kept],
        positions=row_positions[:, kept],
        row_positions=row_positions,
        lengths=np.asarray(lengths),
        value_dim=value_dim,
        sinks=draw(kv_heads * group) if sinks else None,
    )


def reference(p, scale, window):
    """One query at a time, in float64."""
    out = np.zeros((*p["queries"].shape[:3], p["value_dim"]))
    for slot, row, head in np.ndindex(out.shape[:3]):
        own = head // (out.shape[2] // p["rows"][0].shape[2])
        position = p["positions"][slot, row]
        places = np.arange(p["lengths"][slot]), p["row_positions"][slot]
        kept = [np.ones(len(places[0]), bool), p["mask"][slot, row]]
        if window is not None:
            kept = [k & (position - at < window) for k, at in zip(kept, places, strict=True)]
        keys, values = [], []
        for (k, v), which in zip((p["cache"], p["rows"]), kept, strict=True):
            which = np.flatnonzero(which)
            keys.append(k[slot, which, own])
            values.append((k[..., : p["value_dim"]] if v is None else v)[slot, which, own])
        keys, values = (np.concatenate(parts).astype(np.float64) for parts in (keys, values))
        scores = keys @ p["queries"][slot, row, head].astype(np.float64) * scale
        sink = -np.inf if p["sinks"] is None else p["sinks"][head]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        out[slot, row, head] = weights / (weights.sum() + np.exp(sink - top)) @ values
    return out


def arguments(p, dtype=jnp.bfloat16):
    """A problem as tree attention takes it; unused rows of the cache hold infinity (keys) and NaN (values)."""
    cast = lambda array: None if array is None else jnp.asarray(array, dtype)
    ints = lambda array: jnp.asarray(array, jnp.int32)
    unused = (np.arange(p["cache"][0].shape[1]) >= p["lengths"][:, None])[..., None, None]
    spoiled = [
        None if part is None else np.where(unused, bad, part)
        for part, bad in zip(p["cache"], (np.inf, np.nan), strict=True)
    ]
    step = Step(ints(p["positions"]), jnp.asarray(p["mask"]), ints(p["row_positions"]), ints(p["lengths"]))
    return cast(p["queries"]), KVRows(*map(cast, p["rows"])), KVRows(*map(cast, spoiled)), step


def zeros(batch, t, r, heads, kv_heads, size, width, values, dtype=jnp.bfloat16):
    """Arguments to trace with."""
    of = lambda *shape: jnp.zeros(shape, dtype)
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)
    kept = lambda n: KVRows(of(batch, n, kv_heads, width), None if values is None else of(batch, n, kv_heads, values))
    step = Step(ints(batch, t), jnp.zeros((batch, t, r), bool), ints(batch, r), ints(batch))
    return of(batch, t, heads, width), kept(r), kept(size), step
