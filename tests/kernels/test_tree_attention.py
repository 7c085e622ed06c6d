"""Trial 47: tree attention against float64 at the head sizes that models have, with a cache whose unused rows hold NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.rows import KVRows, Step

# queries and keys, values (None: the first channels of the keys), query heads, KV heads
SIZES = {
    "expanded latent 192/128": (192, 128, 128, 4, 4),
    "absorbed latent 512+64": (576, None, 512, 4, 1),
    "96": (96, 96, 96, 3, 1),
    "80": (80, 80, 80, 10, 2),
    "64": (64, 64, 64, 6, 3),
}
SPAN, LENGTHS = 37, (0, 1, 20, 37)
MASK = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)  # a tree: two children, one grandchild


def problem(size: str):
    width, values, value_dim, heads, kv_heads = SIZES[size]
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    batch, t = len(LENGTHS), len(MASK)
    sets = [
        (draw(batch, n, kv_heads, width), None if values is None else draw(batch, n, kv_heads, values))
        for n in (t, SPAN)
    ]
    return draw(batch, t, heads, width), *sets, value_dim, width**-0.5


def reference(queries, rows, cache, value_dim, scale):
    """One query at a time, in float64."""
    out = np.zeros((*queries.shape[:3], value_dim))
    for slot, row, head in np.ndindex(queries.shape[:3]):
        own = head // (queries.shape[2] // rows[0].shape[2])
        keys, values = [], []
        for (k, v), kept in ((cache, slice(0, LENGTHS[slot])), (rows, np.flatnonzero(MASK[row]))):
            keys.append(k[slot, kept, own])
            values.append((k[..., :value_dim] if v is None else v)[slot, kept, own])
        keys, values = (np.concatenate(parts).astype(np.float64) for parts in (keys, values))
        scores = keys @ queries[slot, row, head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[slot, row, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("block", [None, 8, SPAN])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("size", SIZES)
def test_trial_47_head_sizes(size, dtype, error, block):
    queries, rows, cache, value_dim, scale = problem(size)
    cast = lambda array: jnp.asarray(array).astype(jnp.dtype(dtype))
    exact = lambda array: None if array is None else np.asarray(cast(array).astype(jnp.float32))
    unused = np.arange(SPAN) >= np.array(LENGTHS)[:, None]

    def kept(keys, values, spoil=False):
        parts = [
            None if part is None else np.where(unused[..., None, None] & spoil, np.nan, part) for part in (keys, values)
        ]
        return KVRows(*(None if part is None else cast(part.astype(np.float32)) for part in parts))

    lengths = jnp.asarray(LENGTHS, jnp.int32)
    positions = lengths[:, None] + jnp.asarray([0, 1, 1, 2], jnp.int32)
    mask = jnp.broadcast_to(jnp.asarray(MASK), (len(LENGTHS), *MASK.shape))
    step_rows = KVRows(*(None if part is None else cast(part) for part in rows))
    got = tree_attention(
        cast(queries), step_rows, kept(*cache, spoil=True), Step(positions, mask, positions, lengths),
        scale=scale, value_dim=value_dim, block=block,
    )  # fmt: skip
    want = reference(exact(queries), [exact(p) for p in rows], [exact(p) for p in cache], value_dim, scale)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        got.astype(jnp.float32), want, rtol=0, atol=error * (1 if dtype == "float32" else np.abs(want).max())
    )
