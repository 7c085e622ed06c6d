"""What lies between the large products of a layer, fused where a kernel serves it, else in jnp. No Pallas in here: it is imported late."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from eaglejax.kernels.experts_gpu_shape import Parts, summed
from eaglejax.kernels.select import chosen_kernels, no_pallas
from eaglejax.models.config import GQAConfig
from eaglejax.models.layers import RMSNorm, rms_norm
from eaglejax.models.rope import rotate

MOST_ROWS = 64
MOST_WIDTH = 8192  # a row lies in the registers of 128 threads
THREADS = 128


def add_norm(
    x: Float[Array, "b t d"], update: Float[Array, "b t d"] | Parts, scale: Float[Array, " d"], eps: float
) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"]]:
    """The residual stream x + update, and its root-mean-square norm times scale.

    Arguments:
        update: parts are summed first, in their order and in float32, and the sum is rounded to the dtype of x.
    """
    # parts are float32 in any case
    dtypes = [array.dtype for array in (x, scale, x if isinstance(update, Parts) else update)]
    if no_pallas() is None and add_norm_serves(x.size // x.shape[-1], x.shape[-1], dtypes) is None:
        from eaglejax.kernels.add_norm_gpu import add_norm_gpu

        with jax.named_scope("add_norm"):
            return add_norm_gpu(x, update, scale, eps=eps)
    if isinstance(update, Parts):
        update = summed(update, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    x = x + update
    return x, rms_norm(x, scale, eps)


def sums_parts() -> bool:
    """Whether the experts' parts are left to `add_norm` at a layer's end. Only where Pallas was asked for by name: not timed on a card."""
    return no_pallas() is None and chosen_kernels() == "pallas"


def add_norm_serves(rows: int, d: int, dtypes: Sequence[DTypeLike]) -> str | None:
    """Why the kernel cannot do this, or None."""
    if reason := _rows_or_dtypes(rows, dtypes):
        return reason
    if d < THREADS or d > MOST_WIDTH or d % 4:
        return f"rows of {d}: not {THREADS} to {MOST_WIDTH} in fours"
    return None


def norm_rotate(
    queries: Float[Array, "b t q"],
    both: Float[Array, "b t 2 kv"],
    norms: tuple[RMSNorm, RMSNorm] | None,
    positions: Int[Array, "b t"],
    config: GQAConfig,
) -> tuple[Float[Array, "b t h c"], Float[Array, "b t k c"], Float[Array, "b t k c"]]:
    """Queries and keys per head, normed (`norms` of queries and keys) and rotated, and values."""
    batch, rows, _ = queries.shape
    scales = [] if norms is None else [norm.scale[...] for norm in norms]
    dtypes = [array.dtype for array in (queries, both, *scales)]
    if no_pallas() is None and norm_rotate_serves(batch * rows, config, dtypes) is None:
        from eaglejax.kernels.qk_rope_gpu import qk_rope_gpu

        with jax.named_scope("norm_rotate"):
            return qk_rope_gpu(
                queries,
                both,
                positions,
                *scales,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                rope=config.rope,
                eps=config.qk_norm_eps,
            )
    queries = queries.reshape(batch, rows, config.heads, config.head_dim)
    both = both.reshape(batch, rows, 2, config.kv_heads, config.head_dim)
    keys, values = both[:, :, 0], both[:, :, 1]
    if norms is not None:
        queries, keys = norms[0](queries), norms[1](keys)
    return rotate(queries, positions, config.rope), rotate(keys, positions, config.rope), values


def norm_rotate_serves(rows: int, config: GQAConfig, dtypes: Sequence[DTypeLike]) -> str | None:
    """Why the kernel cannot do this, or None."""
    if reason := _rows_or_dtypes(rows, dtypes):
        return reason
    c, lanes = config.head_dim, max(config.head_dim, THREADS)
    if c not in (16, 32, 64, 128, 256):
        return f"heads of {c}: not 16, 32, 64, 128 or 256"
    if config.kv_heads * c % lanes:
        return f"{config.kv_heads} key/value heads of {c}: not a multiple of {lanes}"
    if lanes > THREADS and (config.rope.interleaved or config.rope.rotary_dim % 4):
        return f"heads of {c} whose pairs are not whole words apart"
    return None


def _rows_or_dtypes(rows: int, dtypes: Sequence[DTypeLike]) -> str | None:
    if rows > MOST_ROWS:
        return f"at most {MOST_ROWS} rows, not {rows}"
    if any(dtype != jnp.bfloat16 for dtype in dtypes):
        return "not bfloat16"
    return None
