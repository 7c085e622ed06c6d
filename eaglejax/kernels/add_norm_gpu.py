"""Residual addition and the norm after it for few rows on Hopper GPUs, in one Mosaic kernel: XLA makes two, as a reduction lies between.

What is added may be the experts' sums in parts, as their last kernel leaves them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from eaglejax.kernels.experts_gpu_shape import Parts
from eaglejax.kernels.mosaic import PARAMS

THREADS = 128


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm_gpu(
    x: Float[Array, "*lead d"],
    update: Float[Array, "*lead d"] | Parts,
    scale: Float[Array, " d"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "*lead d"], Float[Array, "*lead d"]]:
    """x + update, and its root-mean-square norm times scale. For what `row_kernels` lets through.

    Arguments:
        update: parts have a row for each of x, in the order of its leading axes; rows beyond those are not read.
        interpret: how the kernel is interpreted on a CPU, for tests.
    """
    d = x.shape[-1]
    sums = update.sums if isinstance(update, Parts) else update.reshape(-1, d)
    parts = sums.shape[0] if isinstance(update, Parts) else None
    total, normed = _kernel(x.size // d, d, parts, eps, interpret)(x.reshape(-1, d), sums, scale)
    return total.reshape(x.shape), normed.reshape(x.shape)


@functools.cache
def _kernel(rows: int, d: int, parts: int | None, eps: float, interpret: Any):
    """A block is one row. `parts`: of the update, where it comes in such."""
    rest = d % THREADS
    # a rest of less than a channel per thread is reached by a second piece that overlaps the first; what both have is summed once
    pieces = [pl.ds(0, d - rest)] + ([pl.ds(d - THREADS, THREADS)] if rest else [])

    def add_norm(x, update, scale, total, normed):
        row = lax.axis_index("row")

        def added(at):
            if parts is None:
                return update[row, at].astype(jnp.float32)
            # in the order and with the rounding of `Parts.total` and `summed`
            loaded = [update[part, row, at] for part in range(parts)]
            return functools.reduce(lambda a, b: a + b, loaded).astype(x.dtype).astype(jnp.float32)

        sums = [(x[row, at].astype(jnp.float32) + added(at)).astype(x.dtype) for at in pieces]
        wide = [piece.astype(jnp.float32) for piece in sums]
        squares = [piece * piece for piece in wide]
        if rest:
            layout = plgpu.Layout.WG_STRIDED((THREADS,), 1)
            lane = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout)
            squares[1] = jnp.where(lane >= THREADS - rest, squares[1], 0.0)
        mean = functools.reduce(lambda a, b: a + b, map(jnp.sum, squares)) / d
        for at, piece, value in zip(pieces, sums, wide, strict=True):
            total[row, at] = piece
            unit = (value * lax.rsqrt(lax.broadcast(mean + eps, value.shape))).astype(x.dtype)
            normed[row, at] = (scale[at].astype(jnp.float32) * unit.astype(jnp.float32)).astype(x.dtype)

    shape = jax.ShapeDtypeStruct((rows, d), jnp.bfloat16)
    return plgpu.kernel(
        add_norm,
        out_type=(shape, shape),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=PARAMS,
        interpret=interpret,
    )
