"""The rows of one forward pass (tree nodes or prompt tokens) and what a layer keeps of them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from eaglejax.models.config import GQAConfig, MLAConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """Where the t rows of a forward pass stand, and what each of them sees.

    Rows see the first `lengths` rows of the cache, and of the r step rows those that `mask` says. The step rows are the
    `earlier` rows handed to the model beside the cache (levels of the same tree, none for a target) followed by the t rows themselves.
    """

    positions: Int[Array, "b t"]  # position of each row, for RoPE and windows
    mask: Bool[Array, "b t r"]  # which step rows each row sees; every row sees itself
    row_positions: Int[Array, "b r"]  # position of every step row
    lengths: Int[Array, " b"]  # valid rows in the cache; row j of the cache stands at position j


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRows:
    """Keys and values of n rows of one layer, keys after RoPE: a cache (n = s) or the rows of one step (n = t).

    Latent attention keeps one "head" of latent + rope width, and no values: they are the latent part of the keys.
    """

    keys: Float[Array, "b n k c"]
    values: Float[Array, "b n k cv"] | None


def settled(rows: KVRows) -> KVRows:
    """The rows, computed once where attention reads them. A GPU's compiler would else keep what they are computed from, several times
    their size, for every layer until the commit."""
    return KVRows(*lax.optimization_barrier((rows.keys, rows.values)))


def causal_step(lengths: Int[Array, " b"], rows: int) -> Step:
    """`rows` consecutive tokens right after the cached ones: prefill chunks, draft extension, teacher forcing."""
    batch = lengths.shape[0]
    positions = lengths[:, None] + jnp.arange(rows, dtype=lengths.dtype)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    return Step(positions, mask, positions, lengths)


def empty_rows(attention: GQAConfig | MLAConfig, batch: int, rows: int, dtype: DTypeLike) -> KVRows:
    """A cache of zeros for one layer."""
    if isinstance(attention, MLAConfig):
        width = attention.kv_lora_rank + attention.rope_dim
        return KVRows(jnp.zeros((batch, rows, 1, width), dtype), None)
    shape = (batch, rows, attention.kv_heads, attention.head_dim)
    return KVRows(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
