"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 section 2.1), always absorbed: heads are never expanded
for the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.attention import joined
from eaglejax.models.config import MLAConfig
from eaglejax.models.layers import PRECISION, Linear, RMSNorm, param
from eaglejax.models.rope import rotate
from eaglejax.models.rows import KVRows, Step, settled
from eaglejax.models.split import WHOLE, Over, local_attention


class LatentAttention(nnx.Module):
    """Keys and values of all heads are linear in one latent of `kv_lora_rank`, so the up-projection of the keys moves
    to the query side and that of the values behind the attention, which then runs over the cached latent as with a
    single key/value head.

    Weights: q_a [rank, in] and q_b [h (n + p), rank], or q [h (n + p), in] without a query rank; kv_a [r + p, in];
    key_up [h, n, r] and value_up [h, v, r], the two parts of a checkpoint's kv_b_proj; out [out, h v].
    (n, p, v: width per head without position, with position, of values; r: the latent.) Split `over` devices, h are one device's;
    the latent is the same on all.
    """

    def __init__(self, config: MLAConfig, in_features: int, out_features: int, *, dtype: DTypeLike, over: Over = WHOLE):
        self.config = config = local_attention(config, over)
        heads, latent = config.heads, config.kv_lora_rank
        q_width = heads * (config.nope_dim + config.rope_dim)
        norm = lambda width: RMSNorm(width, config.norm_eps, dtype=dtype, axes=(None,))
        if config.q_lora_rank is None:
            self.q = Linear(in_features, q_width, axes=("h", "d"), dtype=dtype, over=over)
            self.q_a = self.q_a_norm = self.q_b = None
        else:
            self.q = None
            self.q_a = Linear(in_features, config.q_lora_rank, axes=(None, "d"), dtype=dtype, use_bias=config.bias)
            self.q_a_norm = norm(config.q_lora_rank)
            self.q_b = Linear(config.q_lora_rank, q_width, axes=("h", None), dtype=dtype, over=over)
        self.kv_a = Linear(in_features, latent + config.rope_dim, axes=(None, "d"), dtype=dtype, use_bias=config.bias)
        self.kv_a_norm = norm(latent)
        self.key_up = param((heads, config.nope_dim, latent), ("h", None, None), dtype, over)
        self.value_up = param((heads, config.value_dim, latent), ("h", None, None), dtype, over)
        self.out = Linear(
            heads * config.value_dim,
            out_features,
            axes=("d", "h"),
            dtype=dtype,
            use_bias=config.bias,
            over=over,
            summed=over,
        )

    def _queries(self, x: Float[Array, "b t i"]) -> Float[Array, "b t w"]:
        if self.q is not None:
            return self.q(x)
        assert self.q_a is not None and self.q_a_norm is not None and self.q_b is not None
        return self.q_b(self.q_a_norm(self.q_a(x)))

    def __call__(
        self, x: Float[Array, "b t i"], step: Step, cache: KVRows, earlier: KVRows | None = None
    ) -> tuple[Float[Array, "b t o"], KVRows]:
        """The attention's output and the t own rows: [b, t, 1, r + p], the normed latent beside the rotated shared
        key."""
        with jax.named_scope("mla"):
            config, (batch, rows, _) = self.config, x.shape
            queries = self._queries(x).reshape(batch, rows, config.heads, config.nope_dim + config.rope_dim)
            absorbed = jnp.einsum(
                "bthn,hnr->bthr", queries[..., : config.nope_dim], self.key_up[...], precision=PRECISION
            )
            turned = rotate(queries[..., config.nope_dim :], step.positions, config.rope)
            compressed = self.kv_a(x)
            latent = self.kv_a_norm(compressed[..., : config.kv_lora_rank])
            shared = rotate(compressed[..., None, config.kv_lora_rank :], step.positions, config.rope)
            own = settled(KVRows(jnp.concatenate((latent[:, :, None], shared), axis=-1), None))
            mixed = tree_attention(
                jnp.concatenate((absorbed, turned), axis=-1),
                joined(earlier, own),
                cache,
                step,
                scale=config.scale,
                value_dim=config.kv_lora_rank,
            )
            values = jnp.einsum("bthr,hvr->bthv", mixed, self.value_up[...], precision=PRECISION)
            return self.out(values.reshape(batch, rows, -1)), own
