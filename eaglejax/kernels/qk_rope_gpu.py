"""Between the projections and the attention of few rows on Hopper GPUs: norms of the heads, rotation and the split of keys from values,
in one Mosaic kernel instead of five or more.

A block is one row and as many neighbouring heads as make one channel a thread. The channel that another one is rotated with lies a fixed
distance before or after it, so it is read from a shifted place in shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from eaglejax.kernels.mosaic import PARAMS
from eaglejax.models.config import RopeConfig
from eaglejax.models.rope import cos_sin

THREADS = 128


class Cut(NamedTuple):
    """How a problem is cut. All static."""

    batch: int
    rows: int  # of a slot
    kv_heads: int
    group: int  # query heads per key/value head
    head_dim: int
    rotary_dim: int
    interleaved: bool
    eps: float | None  # of the norms, or None without them

    @property
    def lanes(self) -> int:
        """Channels of a block."""
        return max(self.head_dim, THREADS)

    @property
    def distance(self) -> int:
        """Between the two channels of a rotated pair."""
        return 1 if self.interleaved else self.rotary_dim // 2

    @property
    def together(self) -> bool:
        """Whether queries are left with all rows of a key/value head together, as tree attention reads them: a block must then not
        span two such heads."""
        return self.group * self.head_dim % self.lanes == 0


@functools.partial(jax.jit, static_argnames=("kv_heads", "head_dim", "rope", "eps", "interpret"))
def qk_rope_gpu(
    queries: Float[Array, "b t q"],
    both: Float[Array, "b t 2 kv"],
    positions: Int[Array, "b t"],
    q_scale: Float[Array, " c"] | None = None,
    k_scale: Float[Array, " c"] | None = None,
    *,
    kv_heads: int,
    head_dim: int,
    rope: RopeConfig,
    eps: float = 0.0,
    interpret: Any = None,
) -> tuple[Float[Array, "b t h c"], Float[Array, "b t k c"], Float[Array, "b t k c"]]:
    """Queries and keys, normed and rotated, and values, from what the projections left. For what `row_kernels` lets through.

    Arguments:
        q_scale, k_scale: of the norms over a head's channels; both or none.
        interpret: how the kernel is interpreted on a CPU, for tests.
    """
    batch, rows, width = queries.shape
    heads = width // head_dim
    cut = Cut(
        batch,
        rows,
        kv_heads,
        heads // kv_heads,
        head_dim,
        rope.rotary_dim,
        rope.interleaved,
        None if q_scale is None else eps,
    )
    spread = lambda scale: jnp.tile(scale, cut.lanes // head_dim)
    scales = () if q_scale is None or k_scale is None else (spread(q_scale), spread(k_scale))
    turned, keys, values = _kernel(cut, interpret)(
        queries.reshape(batch * rows, width),
        both.reshape(batch * rows, -1),
        _turns(positions, rope, cut),
        *scales,
    )
    if cut.together:  # attention transposes it back, and the two cancel
        turned = turned.reshape(batch, kv_heads, rows, cut.group, head_dim).transpose(0, 2, 1, 3, 4)
    split = lambda x: x.reshape(batch, rows, -1, head_dim)
    return split(turned), split(keys), split(values)


def _turns(positions: Int[Array, "b t"], rope: RopeConfig, cut: Cut) -> Float[Array, "n 2 lanes"]:
    """What a channel, and the one paired with it, are multiplied by. The same in all layers: XLA computes it once."""
    cos, sin = (x.reshape(cut.batch * cut.rows, -1) for x in cos_sin(positions, rope))
    if cut.interleaved:
        pair = lambda a, b: jnp.stack((a, b), -1).reshape(a.shape[0], -1)
    else:
        pair = lambda a, b: jnp.concatenate((a, b), -1)
    rest = ((0, 0), (0, cut.head_dim - cut.rotary_dim))
    own, other = jnp.pad(pair(cos, cos), rest, constant_values=1), jnp.pad(pair(-sin, sin), rest)
    return jnp.tile(jnp.stack((own, other), 1), cut.lanes // cut.head_dim)


@functools.cache
def _kernel(cut: Cut, interpret: Any):
    c, lanes, distance, normed = cut.head_dim, cut.lanes, cut.distance, cut.eps is not None
    kv_tiles = cut.kv_heads * c // lanes
    q_tiles = kv_tiles * cut.group
    layout = plgpu.Layout.WG_STRIDED((lanes,), lanes // THREADS)
    tile_at = lambda index: pl.ds(pl.multiple_of(index * lanes, lanes), lanes)

    def qk_rope(*refs, shifted):
        q, kv, turns, *scales, q_out, k_out, v_out = refs
        row, tile = lax.axis_index("row"), lax.axis_index("tile")
        lane = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout) & (c - 1)

        def head_sums(x):
            """For every channel the sum over its head."""
            if c == lanes:
                return lax.broadcast(jnp.sum(x), (lanes,))
            head = plgpu.broadcasted_iota(jnp.int32, (lanes,), 0, layout=layout) - lane
            sums = jnp.zeros((lanes,), jnp.float32)
            for start in range(0, lanes, c):
                sums = jnp.where(head == start, jnp.sum(jnp.where(head == start, x, 0.0)), sums)
            return sums

        def turn(x, scale):
            """The same roundings as RMSNorm and rotate."""
            if cut.eps is not None:
                wide = x.astype(jnp.float32)
                wide = wide * lax.rsqrt(head_sums(wide * wide) / c + cut.eps)
                wide = wide.astype(x.dtype).astype(jnp.float32)
                x = (scale[...].astype(jnp.float32) * wide).astype(x.dtype)
            shifted[pl.ds(distance, lanes)] = x
            plgpu.commit_smem()
            after, before = shifted[pl.ds(2 * distance, lanes)], shifted[pl.ds(0, lanes)]
            first = (lane & 1) == 0 if cut.interleaved else lane < distance
            other = jnp.where(first, after, before).astype(jnp.float32)
            turned = (x.astype(jnp.float32) * turns[row, 0] + other * turns[row, 1]).astype(x.dtype)
            return turned if cut.rotary_dim == c else jnp.where(lane < cut.rotary_dim, turned, x)

        @pl.when(tile < q_tiles)
        def _queries():
            out = turn(q[row, tile_at(tile)], scales[0] if normed else None)
            if cut.together:
                slot, head = lax.div(row, jnp.int32(cut.rows)), lax.div(tile, jnp.int32(q_tiles // cut.kv_heads))
                place = (row - slot * cut.rows - head) * (q_tiles // cut.kv_heads) + tile
                q_out[slot * cut.kv_heads + head, tile_at(place)] = out
            else:
                q_out[row, tile_at(tile)] = out

        @pl.when((tile >= q_tiles) & (tile < q_tiles + kv_tiles))
        def _keys():
            index = tile - q_tiles
            k_out[row, tile_at(index)] = turn(kv[row, tile_at(index)], scales[1] if normed else None)

        @pl.when(tile >= q_tiles + kv_tiles)
        def _values():
            index = tile - q_tiles
            v_out[row, tile_at(index - kv_tiles)] = kv[row, tile_at(index)]

    rows, q_width = cut.batch * cut.rows, cut.group * c
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    kv_shape = shape(rows, cut.kv_heads * c)
    return plgpu.kernel(
        qk_rope,
        out_type=(
            shape(cut.batch * cut.kv_heads, cut.rows * q_width)
            if cut.together
            else shape(rows, cut.kv_heads * q_width),
            kv_shape,
            kv_shape,
        ),
        scratch_types={"shifted": plgpu.SMEM((lanes + 2 * distance,), jnp.bfloat16)},
        grid=(rows, q_tiles + 2 * kv_tiles),
        grid_names=("row", "tile"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
