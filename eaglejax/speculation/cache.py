"""Writing committed rows into the caches. Only rows of accepted tokens ever get here: a rejected row leaves no trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from eaglejax.models.rows import KVRows


def put_rows(
    buffer: Shaped[Array, "b n *c"],
    rows: Shaped[Array, "b t *c"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> Shaped[Array, "b n *c"]:
    """`buffer` with the first `count` rows of each slot written at `start`; the other rows go nowhere, as do rows past the end."""
    batch, t = rows.shape[:2]
    index = jnp.arange(t, dtype=jnp.int32)
    places = jnp.where(index < count[:, None], start[:, None] + index, buffer.shape[1])
    slots = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return buffer.at[slots, places].set(rows, mode="drop", unique_indices=True)


def take_rows(rows: Shaped[Array, "b t *c"], path: Int[Array, "b p"]) -> Shaped[Array, "b p *c"]:
    """The rows of each slot that `path` names, in its order."""
    index = path.reshape(path.shape + (1,) * (rows.ndim - 2))
    return jnp.take_along_axis(rows, index, axis=1)


def commit(
    caches: list[KVRows],
    rows: list[KVRows],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    read: Shaped[Array, "b t *d"],
) -> list[KVRows]:
    """Caches with the first `count` step rows of each slot appended at `start`.

    `read` is anything computed from all reads of these caches, such as the pass's output: the write waits for it.
    """

    def one(cache, new):
        return put_rows(cache, new, start, waiting)

    with jax.named_scope("commit"):
        waiting = jnp.where(true_after(read), count, 0)
        return jax.tree.map(one, caches, rows)


def true_after(read: Shaped[Array, "b t *d"]) -> Bool[Array, " b"]:
    """True, but not before `read` is there, and not so plainly that XLA would see it.

    Where nothing orders a write after the reads, XLA copies the whole cache first, twice per layer and cycle.
    """
    word = read.reshape(read.shape[0], -1)[:, 0]
    if jnp.issubdtype(word.dtype, jnp.floating):
        word = lax.bitcast_convert_type(word, jnp.dtype(f"int{8 * word.dtype.itemsize}"))
    return (word | jnp.ones_like(word)) != jnp.zeros_like(word)
