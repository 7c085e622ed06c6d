"""Grouped-query attention over a tree of rows and a cached prefix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from eaglejax.kernels.project import projections
from eaglejax.kernels.row_kernels import norm_rotate
from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.config import GQAConfig
from eaglejax.models.layers import Linear, RMSNorm, param
from eaglejax.models.rows import KVRows, Step, settled
from eaglejax.models.split import WHOLE, Over, local_attention


def joined(earlier: KVRows | None, own: KVRows) -> KVRows:
    """All step rows a row may see: earlier rows of the same step, then the own ones."""
    if earlier is None:
        return own
    keys = jnp.concatenate((earlier.keys, own.keys), axis=1)
    if own.values is None or earlier.values is None:
        return KVRows(keys, None)
    return KVRows(keys, jnp.concatenate((earlier.values, own.values), axis=1))


class GroupedQueryAttention(nnx.Module):
    """`heads` query heads in groups that share a key/value head; biases, per-head norms, sinks and a window as
    configured.

    Weights: q [h c, in], kv [2, k c, in], out [out, h c]; q_norm and k_norm [c]; sinks [h]. Split `over` devices, h and k are one device's.
    """

    def __init__(self, config: GQAConfig, in_features: int, out_features: int, *, dtype: DTypeLike, over: Over = WHOLE):
        self.config = config = local_attention(config, over)
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(in_features, width, axes=("h", "d"), dtype=dtype, use_bias=config.qkv_bias, over=over)
        self.kv = Linear(
            in_features, (2, kv_width), axes=(None, "k", "d"), dtype=dtype, use_bias=config.qkv_bias, over=over
        )
        self.out = Linear(
            width, out_features, axes=("d", "h"), dtype=dtype, use_bias=config.output_bias, over=over, summed=over
        )
        norm = lambda: RMSNorm(config.head_dim, config.qk_norm_eps, dtype=dtype, axes=("c",))
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None
        self.sinks = param((config.heads,), ("h",), dtype, over) if config.sinks else None

    def __call__(
        self, x: Float[Array, "b t i"], step: Step, cache: KVRows, earlier: KVRows | None = None
    ) -> tuple[Float[Array, "b t o"], KVRows]:
        """The attention's output and the t own rows (keys after RoPE), which the caller may write to the cache."""
        with jax.named_scope("gqa"):
            config, (batch, rows, _) = self.config, x.shape
            norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
            q, kv = projections(x, self.q, self.kv)
            queries, keys, values = norm_rotate(q, kv, norms, step.positions, config)
            own = settled(KVRows(keys, values))
            mixed = tree_attention(
                queries,
                joined(earlier, own),
                cache,
                step,
                scale=config.head_dim**-0.5,
                value_dim=config.head_dim,
                window=config.window,
                sinks=None if self.sinks is None else self.sinks[...],
            )
            return self.out(mixed.reshape(batch, rows, -1)), own
