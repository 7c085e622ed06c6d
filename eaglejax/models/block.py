"""One decoder block."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from eaglejax.kernels.experts_gpu_shape import Parts
from eaglejax.kernels.row_kernels import add_norm, sums_parts
from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MLAConfig, MoEConfig
from eaglejax.models.layers import MLP, RMSNorm
from eaglejax.models.mla import LatentAttention
from eaglejax.models.moe import MoE
from eaglejax.models.rows import KVRows, Step
from eaglejax.models.split import WHOLE, LayerSplit, Over


def build_attention(
    config: GQAConfig | MLAConfig, in_features: int, out_features: int, *, dtype: DTypeLike, over: Over = WHOLE
) -> GroupedQueryAttention | LatentAttention:
    """The attention module that a config asks for."""
    kind = LatentAttention if isinstance(config, MLAConfig) else GroupedQueryAttention
    return kind(config, in_features, out_features, dtype=dtype, over=over)  # pyright: ignore[reportArgumentType]


def build_mlp(
    config: DenseConfig | MoEConfig, features: int, *, dtype: DTypeLike, split: LayerSplit | None = None
) -> MLP | MoE:
    """The MLP or mixture of experts that a config asks for."""
    split = split or LayerSplit()
    if isinstance(config, MoEConfig):
        return MoE(config, features, dtype=dtype, over=split.mlp, shared_over=split.shared)
    return MLP(config, features, dtype=dtype, over=split.mlp)


class Block(nnx.Module):
    """Pre-norm attention and pre-norm MLP (or experts), both added to the residual stream."""

    def __init__(
        self,
        config: LayerConfig,
        hidden_size: int,
        norm_eps: float,
        *,
        dtype: DTypeLike,
        split: LayerSplit | None = None,
    ):
        split = split or LayerSplit()
        self.input_norm = RMSNorm(hidden_size, norm_eps, dtype=dtype)
        self.attention = build_attention(config.attention, hidden_size, hidden_size, dtype=dtype, over=split.attention)
        self.post_norm = RMSNorm(hidden_size, norm_eps, dtype=dtype)
        self.mlp = build_mlp(config.mlp, hidden_size, dtype=dtype, split=split)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        step: Step,
        cache: KVRows,
        earlier: KVRows | None = None,
        *,
        normed: Float[Array, "b t d"] | None = None,
        next_scale: Float[Array, " d"] | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"] | None, KVRows]:
        """The residual stream after the block; the norm of it that follows, where one kernel makes both; the t own rows for the cache.

        Arguments:
            normed: what `input_norm` makes of x, where it is there already.
            next_scale: of the norm that follows, whose eps is that of `input_norm`. An array, so that alike blocks have one trace.
        """
        with jax.named_scope("block"):
            mixed, rows = self.attention(self.input_norm(x) if normed is None else normed, step, cache, earlier)
            x, normed = add_norm(x, mixed, self.post_norm.scale[...], self.post_norm.eps)
            if next_scale is None or not isinstance(self.mlp, MoE) or not sums_parts():
                return x + self.mlp(normed), None, rows
            update = self.mlp.unsummed(normed)
            if isinstance(update, Parts):
                return *add_norm(x, update, next_scale, self.input_norm.eps), rows
            return x + update, None, rows
