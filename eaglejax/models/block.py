"""One decoder block."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from eaglejax.kernels.row_kernels import add_norm
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
        self, x: Float[Array, "b t d"], step: Step, cache: KVRows, earlier: KVRows | None = None
    ) -> tuple[Float[Array, "b t d"], KVRows]:
        """The residual stream after the block, and the t own rows for the cache."""
        with jax.named_scope("block"):
            mixed, rows = self.attention(self.input_norm(x), step, cache, earlier)
            x, normed = add_norm(x, mixed, self.post_norm)
            return x + self.mlp(normed), rows
