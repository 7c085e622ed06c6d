"""Tree attention on Hopper GPUs: one Pallas (Mosaic GPU) kernel over the cached prefix and the step rows, and one merge of its parts.

Keys lie on the rows of the tensor cores' products, query rows on the columns: S^T = K q^T, O^T = V^T P^T. A tree has few rows, and
the columns may be as few as 8 where the rows may not be fewer than 64. The keys of a slot (its prefix, then the step rows) are cut into
tiles and the tiles into contiguous ranges, one range a block, by the length that the slot has at run time. Every block leaves the mean of
the values of its range and the range's weight, a logarithm to base 2 (-inf without a visible key); a second
kernel merges them.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from eaglejax.kernels.tree_attention_shape import MOST_ROWS, most_rows, ranges, rows_of, splits_of, stages_of, tile_of
from eaglejax.models.rows import KVRows, Step

PART = jnp.float32  # of what a range leaves
EIGHT = 8  # rows of a unit of copying: longer arrays are of whole units
LOG2_E = math.log2(math.e)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # one value per query row
MATRIX = plgpu.Layout.WGMMA
PARAMETERS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class Cut(NamedTuple):
    """How a problem is cut. All static."""

    rows: int  # query rows of a block, padded to a multiple of 8
    blocks: int  # blocks of query rows per key/value head
    width: int  # of keys
    value_width: int
    latent: bool  # values are the first columns of the keys
    tile: int  # keys of a tile
    stages: int  # tiles in shared memory
    splits: int  # ranges of tiles
    window: int | None
    scale: float

    @property
    def chunk(self) -> int:
        """Columns of the values that are mixed at a time: more would not fit into registers beside the sums so far."""
        return math.gcd(self.value_width, 128)

    @property
    def left_width(self) -> int:
        """Columns of what a range leaves: one or more for each of the 128 threads that merge. Those beyond the values are never written."""
        return pl.cdiv(self.value_width, 128) * 128


def serves(
    queries: Float[Array, "b t h c"], rows: KVRows, cache: KVRows, value_dim: int, tile: int | None = None
) -> str | None:
    """Why the kernel cannot do this, or None."""
    _, t, heads, width = queries.shape
    count = t * heads // rows.keys.shape[2]
    if queries.dtype != jnp.bfloat16 or any(x.dtype != jnp.bfloat16 for x in jax.tree.leaves((rows, cache))):
        return "only bfloat16"
    if width % 64 or value_dim % 64:
        return f"head sizes {width} and {value_dim}: not multiples of 64"
    if (size := cache.keys.shape[1]) == 0 or size % EIGHT:
        return f"a cache of {size} rows: not a multiple of {EIGHT}"
    if count > MOST_ROWS:
        return f"{count} query rows per key/value head, more than {MOST_ROWS}"
    most = most_rows(value_dim)
    if most == 0:
        return f"values of {value_dim} do not fit into registers"
    _, padded = rows_of(count, most)
    if stages_of(padded, width, value_dim, rows.values is None, tile or tile_of(width, value_dim)) < 2:
        return f"{padded} rows and two tiles of width {width} do not fit into shared memory"
    return None


def tree_attention_gpu(
    queries: Float[Array, "b t h c"],
    rows: KVRows,
    cache: KVRows,
    step: Step,
    *,
    scale: float,
    value_dim: int,
    window: int | None = None,
    sinks: Float[Array, " h"] | None = None,
    tile: int | None = None,
    splits: int | None = None,
    block_rows: int | None = None,
) -> Float[Array, "b t h cv"]:
    """`tree_attention.tree_attention` for what `serves` admits; same arguments, same result up to rounding.

    Arguments:
        tile: keys of a tile, 64 or 128; by default, as for the next two, what is stored for this shape, else by size.
        splits: ranges of keys; by rule as many as fill the card.
        block_rows: most query rows that share a block, a multiple of 8; by rule as many as registers hold.
    """
    batch, t, heads, width = queries.shape
    kv_heads, step_rows = rows.keys.shape[2], rows.keys.shape[1]
    if step_rows > EIGHT and step_rows % EIGHT:
        rows = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, -step_rows % EIGHT), (0, 0), (0, 0))), rows)
    group = heads // kv_heads
    latent = rows.values is None
    cached = cache.keys.shape[1]
    chosen = ranges(batch, t, heads, kv_heads, width, value_dim, latent, cached)
    blocks, padded = rows_of(t * group, block_rows or chosen.block_rows)
    tile = tile or chosen.tile
    tiles = pl.cdiv(cached, tile) + pl.cdiv(step_rows, tile)
    splits = splits or (splits_of(batch * kv_heads * blocks) if block_rows else chosen.splits)
    splits = min(splits, tiles)
    stages = min(stages_of(padded, width, value_dim, latent, tile), tiles)
    cut = Cut(padded, blocks, width, value_dim, latent, tile, stages, splits, window, scale)

    grouped = queries.reshape(batch, t, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    columns = _in_blocks(grouped.reshape(batch, kv_heads, t * group, width), cut, axis=2)
    visible = step.mask
    if window is not None:
        visible &= step.positions[:, :, None] - step.row_positions[:, None, :] < window
    operands = [columns, *_arrays(cache), *_arrays(rows), _columns_of(visible, group, cut), step.lengths]
    if window is not None:
        oldest = jnp.clip(step.positions.min(1) - (window - 1), 0, step.lengths)
        operands += [oldest, _in_blocks(jnp.repeat(step.positions, group, axis=1), cut, axis=1)]
    mixed, weight = _kernel(cut, batch, kv_heads)(*operands)
    return _merge(cut, queries, kv_heads, mixed, weight, sinks)


def _in_blocks(x: Array, cut: Cut, axis: int) -> Array:
    """Pads the query rows along an axis and splits it into blocks."""
    spare = [(0, 0)] * x.ndim
    spare[axis] = (0, cut.blocks * cut.rows - x.shape[axis])
    return jnp.pad(x, spare).reshape(*x.shape[:axis], cut.blocks, cut.rows, *x.shape[axis + 1 :])


def _arrays(rows: KVRows) -> list[Array]:
    return [rows.keys] if rows.values is None else [rows.keys, rows.values]


def _columns_of(visible: Bool[Array, "b t r"], group: int, cut: Cut) -> Int[Array, "b B R N"]:
    """Which step rows each column sees, in whole tiles. The same for all layers with the same window: XLA computes it once."""
    r = visible.shape[2]
    columns = jnp.pad(visible.astype(jnp.int32), ((0, 0), (0, 0), (0, pl.cdiv(r, cut.tile) * cut.tile - r)))
    return _in_blocks(jnp.repeat(columns, group, axis=1), cut, axis=1).transpose(0, 1, 3, 2)


def _kernel(cut: Cut, batch: int, kv_heads: int) -> Any:
    parts = (batch, kv_heads * cut.blocks, cut.splits)
    out_type = (
        jax.ShapeDtypeStruct((*parts, cut.rows, cut.left_width), PART),
        jax.ShapeDtypeStruct((*parts, cut.rows), jnp.float32),
    )
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shared = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled)
    scratch = {
        "q_s": shared(cut.rows, cut.width),
        "k_s": shared(cut.stages, cut.tile, cut.width),
        "p_s": shared(cut.rows, cut.tile),
        "q_ready": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=1 if cut.latent else 2, num_barriers=cut.stages),
    }
    if not cut.latent:
        scratch["v_s"] = shared(cut.stages, cut.tile, cut.value_width)

    def tree_attention(*refs, **scratch):
        _body(cut, refs, **scratch)

    return plgpu.kernel(
        tree_attention,
        out_type=out_type,
        scratch_types=scratch,
        grid=parts,
        grid_names=("slot", "column", "split"),
        compiler_params=PARAMETERS,
    )


def _body(cut: Cut, refs, q_s, k_s, p_s, q_ready, full, v_s=None) -> None:
    """One block: its range of tiles of one slot and key/value head."""
    names = ["q", "keys", "values", "step_keys", "step_values", "seen", "lengths", "oldest", "positions"]
    absent = ({"values", "step_values"} if cut.latent else set()) | (
        {"oldest", "positions"} if cut.window is None else set()
    )
    given = dict(zip([name for name in names if name not in absent], refs, strict=False))
    mixed, weight = refs[-2:]
    slot, column, split = (lax.axis_index(name) for name in ("slot", "column", "split"))
    head, block = lax.div(column, cut.blocks), lax.rem(column, cut.blocks)

    length = given["lengths"][slot]
    begin = 0 if cut.window is None else lax.div(given["oldest"][slot], cut.tile)
    prefix = lax.div(length + (cut.tile - 1), cut.tile) - begin  # tiles of the prefix that any row sees
    step_tiles = given["seen"].shape[2] // cut.tile
    each = lax.div(prefix + (step_tiles + cut.splits - 1), cut.splits)
    first = split * each
    count = jnp.maximum(jnp.minimum(first + each, prefix + step_tiles) - first, 0)
    cached = jnp.clip(prefix - first, 0, count)  # the first tiles of the range; step rows follow

    def issue(index):
        """Starts the copy of a tile. Rows beyond the end of an array come as zeros."""
        stage = lax.rem(index, cut.stages)

        def copy(keys, values, tile):
            rows = pl.ds(pl.multiple_of(tile * cut.tile, cut.tile), cut.tile)
            plgpu.copy_gmem_to_smem(given[keys].at[slot, rows, head], k_s.at[stage], full.at[stage])
            if v_s is not None:
                plgpu.copy_gmem_to_smem(given[values].at[slot, rows, head], v_s.at[stage], full.at[stage])

        pl.when(index < cached)(lambda: copy("keys", "values", begin + first + index))
        pl.when(index >= cached)(lambda: copy("step_keys", "step_values", first + index - prefix))

    def one_tile(index, state, *, in_prefix):
        top, total, sums = state
        stage = lax.rem(index, cut.stages)
        kept = k_s.at[stage] if v_s is None else v_s.at[stage]
        plgpu.barrier_wait(full.at[stage])
        scores = _product((cut.tile, cut.rows), k_s.at[stage], q_s.transpose((1, 0)))
        across = partial(lax.broadcast_in_dim, shape=(cut.tile, cut.rows), broadcast_dimensions=(1,))
        if in_prefix:
            start = (begin + first + index) * cut.tile
            keys = start + plgpu.broadcasted_iota(jnp.int32, (cut.tile, cut.rows), 0, layout=MATRIX)
            seen = keys < length
            if cut.window is not None:
                positions = _load(given["positions"].at[slot, block], COLUMNS)
                seen &= across(positions) - keys < cut.window
            pl.when(start + cut.tile > length)(lambda: _clear(kept, length - start, cut))
        else:
            start = pl.multiple_of((first + index - prefix) * cut.tile, cut.tile)
            seen = _load(given["seen"].at[slot, block, pl.ds(start, cut.tile)], MATRIX) != 0
        scores = jnp.where(seen, scores * (cut.scale * LOG2_E), -jnp.inf)
        new_top = jnp.maximum(top, scores.max(0))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet: exp2(-inf - 0), not NaN
        weights = jnp.exp2(scores - across(base))
        shrink = jnp.exp2(top - base)
        p_s.transpose((1, 0))[...] = plgpu.layout_cast(weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        total = total * shrink + weights.sum(0)
        shape = (cut.chunk, cut.rows)
        shrink = lax.broadcast_in_dim(shrink, shape, (1,))
        sums = tuple(
            held * shrink + _product(shape, kept.at[:, pl.ds(at, cut.chunk)].transpose((1, 0)), p_s.transpose((1, 0)))
            for held, at in zip(sums, range(0, cut.value_width, cut.chunk), strict=True)
        )
        pl.when(index + cut.stages < count)(lambda: issue(index + cut.stages))
        return new_top, total, sums

    def leave(logarithm, means):
        for at, values in enumerate(means):
            out = mixed.at[slot, column, split, :, pl.ds(at * cut.chunk, cut.chunk)]
            out.transpose((1, 0))[...] = plgpu.layout_cast(values.astype(PART), plgpu.Layout.WGMMA_TRANSPOSED)
        weight[slot, column, split] = logarithm

    full_column = lambda value: plgpu.layout_cast(jnp.full((cut.rows,), value, jnp.float32), COLUMNS)
    zeros = plgpu.layout_cast(jnp.zeros((cut.chunk, cut.rows), jnp.float32), MATRIX)

    @pl.when(count > 0)
    def _work():
        plgpu.copy_gmem_to_smem(given["q"].at[slot, head, block], q_s, q_ready)
        for index in range(cut.stages):
            pl.when(index < count)(partial(issue, jnp.int32(index)))
        state = full_column(-jnp.inf), full_column(0.0), (zeros,) * (cut.value_width // cut.chunk)
        plgpu.barrier_wait(q_ready)
        state = lax.fori_loop(0, cached, partial(one_tile, in_prefix=True), state)
        top, total, sums = lax.fori_loop(cached, count, partial(one_tile, in_prefix=False), state)
        held = jnp.where(total > 0, total, 1.0)
        leave(top + jnp.log2(held), [values / lax.broadcast_in_dim(held, values.shape, (1,)) for values in sums])

    @pl.when(count == 0)
    def _nothing():
        leave(full_column(-jnp.inf), [zeros] * (cut.value_width // cut.chunk))


def _product(shape: tuple[int, int], left, right) -> Array:
    """left @ right of shared memory. A fresh accumulator each time: one that lives on could not be interpreted on a CPU."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _load(ref: Any, layout: Any) -> Array:
    load: Any = plgpu.load  # of other arguments in older versions of jax
    return load(ref, layout=layout, optimized=False)


def _clear(values, length, cut: Cut) -> None:
    """Zeros for the values of unused rows: they may be NaN, and 0 * NaN is NaN."""
    for at in range(0, cut.value_width, cut.chunk):
        part = values.at[:, pl.ds(at, cut.chunk)]
        rows = plgpu.broadcasted_iota(jnp.int32, (cut.tile, cut.chunk), 0, layout=MATRIX)
        part[...] = jnp.where(rows < length, _load(part, MATRIX), jnp.bfloat16(0))


def _merge(
    cut: Cut,
    queries: Float[Array, "b t h c"],
    kv_heads: int,
    mixed: Float[Array, "b K p N W"],
    weight: Float[Array, "b K p N"],
    sinks: Float[Array, " h"] | None,
) -> Float[Array, "b t h cv"]:
    """The mean of all ranges by their weights, one query a block. XLA makes four kernels or more of it, as reductions."""
    batch, t, heads, _ = queries.shape
    group = heads // kv_heads

    def merge_tree_attention(mixed, weight, *rest):
        slot, row, head = (lax.axis_index(name) for name in ("slot", "row", "head"))
        index = row * group + lax.rem(head, group)
        column = lax.div(head, group) * cut.blocks + lax.div(index, cut.rows)
        place = lax.rem(index, cut.rows)
        weights = [weight[slot, column, split, place] for split in range(cut.splits)]
        parts = [mixed[slot, column, split, place] for split in range(cut.splits)]
        extra = [rest[0][head] * LOG2_E] if sinks is not None else []
        top = reduce(jnp.maximum, weights + extra)
        shares = [jnp.exp2(one - top) for one in weights + extra]
        mean = reduce(jnp.add, [part * share for part, share in zip(parts, shares, strict=False)])
        rest[-1][slot, row, head] = (mean / reduce(jnp.add, shares)).astype(queries.dtype)

    merged = plgpu.kernel(
        merge_tree_attention,
        out_type=jax.ShapeDtypeStruct((batch, t, heads, cut.left_width), queries.dtype),
        grid=(batch, t, heads),
        grid_names=("slot", "row", "head"),
        compiler_params=PARAMETERS,
    )(mixed, weight, *([] if sinks is None else [sinks.astype(jnp.float32)]))
    return merged[..., : cut.value_width]
