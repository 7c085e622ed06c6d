"""Tree attention on GPUs without Hopper's instructions (Ampere, Ada, Blackwell): Pallas by its Triton backend, in bfloat16 and float32.

The cached prefix of a slot is cut into ranges of positions, by the size of the cache alone; the step rows are a range of their own. Every
program takes one range of one block of query rows and leaves the mean of the range's values and the range's weight, a logarithm to base 2
(-inf without a visible key, and then no mean is written); a second kernel merges them in order. Neither ranges nor tiles nor the rows of a
block depend on how many rows are asked for or how long a slot is, so that a row's sums have one order.

What lies beyond the end of an array or a slot's length is never read: loads and stores are masked. A width that is no power of two is a
sequence of blocks that are. Compiled for sm_80, sm_100 and sm_120 in the tests, never run on a card: only where it is asked for.
The Triton backend is deprecated since jax 0.11 and has no successor that these devices can run.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu
from jaxtyping import Array, Float

from eaglejax.models.rows import KVRows, Step

DTYPES = (jnp.bfloat16, jnp.float32)
LEAST = 16  # rows, columns and depth of the smallest product
MOST_ROWS = 256  # query rows of a key/value head: each block of them reads the cache once more, from the second-level cache at best
MOST_WIDTH = 512  # of values: their sums stay in registers
MOST_COLUMNS = 128  # of a block of a width
MOST_RANGES = 64  # of the prefix
LEAST_RANGE = 256  # cached rows of a range: the fewer, the more the merge has to read beside them
# of keys and values: two tiles fit into the 99 KiB that a block may have on sm_86, sm_89 and sm_120
TILE_BYTES = 40 * 1024
MOST_TILE = 64
MERGED = 8  # ranges that the merge takes at a time
LOG2_E = math.log2(math.e)


class Columns(NamedTuple):
    """A block of columns; `size` is a power of two."""

    start: int
    size: int


class Cut(NamedTuple):
    """How a problem is cut. All static."""

    count: int  # query rows per key/value head
    rows: int  # of them in a block
    blocks: int
    tile: int  # keys of a tile
    reach: int  # cached rows of a range, whole tiles
    ranges: int  # of the prefix; one more holds the step rows
    warps: int
    keys: tuple[Columns, ...]  # the first ones are those of the values where these are the first columns of the keys
    values: tuple[Columns, ...]
    latent: bool
    window: int | None
    scale: float


def serves(queries: Float[Array, "b t h c"], rows: KVRows, cache: KVRows, value_dim: int) -> str | None:
    """Why the kernel cannot do this, or None."""
    _, t, heads, width = queries.shape
    count = t * heads // rows.keys.shape[2]
    if queries.dtype not in DTYPES or any(x.dtype != queries.dtype for x in jax.tree.leaves((rows, cache))):
        return "only bfloat16 or float32, the same throughout"
    if cache.keys.shape[1] == 0:
        return "no cached rows"
    if count > MOST_ROWS:
        return f"{count} query rows per key/value head, more than {MOST_ROWS}"
    return serves_widths(width, value_dim, rows.values is None, queries.dtype.itemsize)


def serves_widths(width: int, value_width: int, latent: bool, item: int) -> str | None:
    """Why keys and values of these widths, of `item` bytes an element, are not served, or None."""
    if value_width > MOST_WIDTH:
        return f"values of {value_width}, more than {MOST_WIDTH}, do not fit into registers"
    if width % LEAST or value_width % LEAST:
        return f"head sizes {width} and {value_width} are not multiples of {LEAST}"
    if _tile(width, value_width, latent, item) < LEAST:
        return f"head sizes {width} and {value_width}: two tiles do not fit into shared memory"
    return None


def tree_attention_portable(
    queries: Float[Array, "b t h c"],
    rows: KVRows,
    cache: KVRows,
    step: Step,
    *,
    scale: float,
    value_dim: int,
    window: int | None = None,
    sinks: Float[Array, " h"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b t h cv"]:
    """`tree_attention.tree_attention` for what `serves` admits; same arguments, same result up to rounding.

    Arguments:
        interpret: runs it on any device, slowly, by Pallas' interpreter.
    """
    batch, t, heads, width = queries.shape
    kv_heads = rows.keys.shape[2]
    group = heads // kv_heads
    latent = rows.values is None
    cut = _cut(t, group, cache.keys.shape[1], width, value_dim, latent, window, scale, queries.dtype.itemsize)
    grouped = queries.reshape(batch, t, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    visible = step.mask
    if window is not None:
        visible &= step.positions[:, :, None] - step.row_positions[:, None, :] < window
    given = {
        "queries": grouped.reshape(batch, kv_heads, t * group, width),
        "keys": cache.keys,
        "step_keys": rows.keys,
        # the same for all layers with the same window: XLA computes it once
        "visible": jnp.repeat(visible.astype(jnp.int32), group, axis=1),
        "lengths": step.lengths,
    }
    if not latent:
        given |= {"values": cache.values, "step_values": rows.values}
    if window is not None:
        given |= {
            "oldest": jnp.clip(step.positions.min(1) - (window - 1), 0, step.lengths),
            "positions": jnp.repeat(step.positions, group, axis=1),
        }
    mixed, weight = _ranges(cut, given, batch, kv_heads, value_dim, interpret)
    return _merge(cut, queries, group, value_dim, mixed, weight, sinks, interpret)


def left_bytes(
    slots: int, t: int, heads: int, kv_heads: int, width: int, value_width: int, cached: int, latent: bool, item: int
) -> int | None:
    """Bytes of what the ranges leave for the merge, t rows a slot over `cached` rows; None for what the kernel does not serve."""
    group = heads // kv_heads
    if t * group > MOST_ROWS or serves_widths(width, value_width, latent, item) is not None:
        return None
    cut = _cut(t, group, cached, width, value_width, latent, None, 1.0, item)
    parts = cut.ranges + 1
    return slots * kv_heads * cut.blocks * cut.rows * (parts * value_width + pl.next_power_of_2(parts)) * 4


def _cut(
    t: int,
    group: int,
    cached: int,
    width: int,
    value_width: int,
    latent: bool,
    window: int | None,
    scale: float,
    item: int,
) -> Cut:
    rows = _block_rows(group, value_width, item)
    tile = _tile(width, value_width, latent, item)
    reach = max(LEAST_RANGE, pl.cdiv(pl.cdiv(cached, MOST_RANGES), tile) * tile)
    values = _columns(0, value_width)
    keys = values + _columns(value_width, width) if latent else _columns(0, width)
    warps = 8 if value_width > 256 else 4
    blocks, ranges = pl.cdiv(t * group, rows), pl.cdiv(cached, reach)
    return Cut(t * group, rows, blocks, tile, reach, ranges, warps, keys, values, latent, window, scale)


def _block_rows(group: int, value_width: int, item: int) -> int:
    """Query rows of a block: by the model's heads, not by the rows asked for, on which a row's sums must not depend."""
    most = 64 if value_width <= 128 else 32
    if item == 4:
        most = LEAST  # float32 is multiplied without tensor cores, from registers
    return min(most, max(LEAST, pl.next_power_of_2(4 * group)))


def _tile(width: int, value_width: int, latent: bool, item: int) -> int:
    """Keys of a tile, a power of two."""
    most = TILE_BYTES // ((width if latent else width + value_width) * item)
    most = min(most, MOST_TILE if item == 2 else LEAST)
    return 1 << (most.bit_length() - 1) if most else 0


def _columns(start: int, end: int) -> tuple[Columns, ...]:
    """Columns from start to end, in blocks of powers of two."""
    blocks = []
    while start < end:
        size = min(MOST_COLUMNS, 1 << ((end - start).bit_length() - 1))
        blocks.append(Columns(start, size))
        start += size
    return tuple(blocks)


def _across(values: Array, width: int) -> Array:
    """[rows] -> [rows, width]."""
    return lax.broadcast_in_dim(values, (values.shape[0], width), (0,))


def _load(ref: Any, index: tuple[Any, ...], rows: Array, columns: Columns) -> Array:
    """[rows, columns] of a ref whose last axis is the columns'; zeros for rows [rows] that are not to be read."""
    at = ref.at[(*index, pl.ds(columns.start, columns.size))]
    return gpu.load(at, mask=_across(rows, columns.size), other=0.0)


def _product(left: Array, right: Array, *, turned: bool = False) -> Array:
    """left @ right, or left @ right^T, in float32. float32 is multiplied as such: no TF32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return gpu.dot(left, right, trans_b=turned, precision=precision).astype(jnp.float32)


def _ranges(
    cut: Cut, given: dict[str, Any], batch: int, kv_heads: int, value_width: int, interpret: bool
) -> tuple[Float[Array, "b K p N cv"], Float[Array, "b K P N"]]:
    """What every range leaves: the mean of its values, and its weight, which have room for a power of two of ranges."""
    columns, parts = kv_heads * cut.blocks, cut.ranges + 1

    def tree_attention(*refs):
        _body(cut, dict(zip(given, refs, strict=False)), *refs[-2:])

    return pl.pallas_call(
        tree_attention,
        out_shape=(
            jax.ShapeDtypeStruct((batch, columns, parts, cut.rows, value_width), jnp.float32),
            jax.ShapeDtypeStruct((batch, columns, pl.next_power_of_2(parts), cut.rows), jnp.float32),
        ),
        # the first axis is the only one without a limit of 65,535
        grid=(parts, columns, batch),
        compiler_params=gpu.CompilerParams(num_warps=cut.warps, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(*given.values())


def _body(cut: Cut, given: dict[str, Any], mixed: Any, weight: Any) -> None:
    """One program: one range of one slot, key/value head and block of query rows."""
    part, column, slot = (pl.program_id(axis) for axis in range(3))
    head, block = lax.div(column, cut.blocks), lax.rem(column, cut.blocks)
    first = block * cut.rows
    places = pl.ds(first, cut.rows)
    real = first + jnp.arange(cut.rows) < cut.count
    length, step_rows = given["lengths"][slot], given["step_keys"].shape[1]

    begin = part * cut.reach
    end = jnp.minimum(begin + cut.reach, length)  # for the step rows' part, whose begin is beyond the cache: none
    if cut.window is not None:
        begin = jnp.maximum(begin, lax.div(given["oldest"][slot], cut.tile) * cut.tile)
    tiles = lax.div(begin, cut.tile), lax.div(end + (cut.tile - 1), cut.tile)
    step_tiles = (part == cut.ranges).astype(jnp.int32) * pl.cdiv(step_rows, cut.tile)
    across = partial(_across, width=cut.tile)
    along = partial(lax.broadcast_in_dim, shape=(cut.rows, cut.tile), broadcast_dimensions=(1,))

    queries = [_load(given["queries"], (slot, head, places), real, columns) for columns in cut.keys]

    def one_tile(index, state, *, in_prefix):
        top, total, sums = state
        start = index * cut.tile
        keys_at = start + jnp.arange(cut.tile)
        held = keys_at < (end if in_prefix else step_rows)
        where = slot, pl.ds(start, cut.tile), head
        keys = [_load(given["keys" if in_prefix else "step_keys"], where, held, columns) for columns in cut.keys]
        parts = [_product(q, k, turned=True) for q, k in zip(queries, keys, strict=True)]
        scores = reduce(jnp.add, parts)
        seen = along(held)
        if not in_prefix:
            visible = given["visible"].at[slot, places, pl.ds(start, cut.tile)]
            seen &= gpu.load(visible, mask=across(real) & seen, other=0) != 0
        elif cut.window is not None:
            positions = gpu.load(given["positions"].at[slot, places], mask=real, other=0)
            seen &= across(positions) - along(keys_at) < cut.window
        scores = jnp.where(seen, scores * (cut.scale * LOG2_E), -jnp.inf)
        new_top = jnp.maximum(top, scores.max(1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet: exp2(-inf - 0), not NaN
        weights = jnp.exp2(scores - across(base))
        shrink = jnp.exp2(top - base)
        total = total * shrink + weights.sum(1)
        if cut.latent:
            values = keys[: len(cut.values)]
        else:
            source = given["values" if in_prefix else "step_values"]
            values = [_load(source, where, held, columns) for columns in cut.values]
        weights = weights.astype(values[0].dtype)
        sums = tuple(
            kept * _across(shrink, kept.shape[1]) + _product(weights, value)
            for kept, value in zip(sums, values, strict=True)
        )
        return new_top, total, sums

    state = (
        jnp.full((cut.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((cut.rows,), jnp.float32),
        tuple(jnp.zeros((cut.rows, columns.size), jnp.float32) for columns in cut.values),
    )
    state = lax.fori_loop(*tiles, partial(one_tile, in_prefix=True), state)
    top, total, sums = lax.fori_loop(0, step_tiles, partial(one_tile, in_prefix=False), state)
    held = jnp.where(total > 0, total, 1.0)
    gpu.store(weight.at[slot, column, part], top + jnp.log2(held))

    @pl.when((tiles[0] < tiles[1]) | (step_tiles > 0))
    def _leave():
        for values, columns in zip(sums, cut.values, strict=True):
            out = mixed.at[slot, column, part, :, pl.ds(columns.start, columns.size)]
            gpu.store(out, values / _across(held, columns.size), mask=_across(real, columns.size))


def _merge(
    cut: Cut,
    queries: Float[Array, "b t h c"],
    group: int,
    value_width: int,
    mixed: Float[Array, "b K p N cv"],
    weight: Float[Array, "b K P N"],
    sinks: Float[Array, " h"] | None,
    interpret: bool,
) -> Float[Array, "b t h cv"]:
    """The mean of all ranges by their weights, one query a program."""
    batch, t, heads, _ = queries.shape
    parts = cut.ranges + 1
    padded = weight.shape[2]

    def merge_tree_attention(mixed, weight, *rest):
        head, row, slot = (pl.program_id(axis) for axis in range(3))
        index = row * group + lax.rem(head, group)
        column = lax.div(head, group) * cut.blocks + lax.div(index, cut.rows)
        place = lax.rem(index, cut.rows)

        def weights(first, size):
            at = weight.at[slot, column, pl.ds(first, size), place]
            return gpu.load(at, mask=first + jnp.arange(size) < parts, other=-jnp.inf)

        logarithms = weights(0, padded)
        top = logarithms.max()
        if sinks is not None:
            sink = rest[0][head] * LOG2_E
            top = jnp.maximum(top, sink)
        total = jnp.exp2(logarithms - top).sum()
        if sinks is not None:
            total += jnp.exp2(sink - top)

        def some(index, sums):
            first = index * MERGED
            shares = jnp.exp2(weights(first, MERGED) - top)
            where = slot, column, pl.ds(first, MERGED), place
            return tuple(
                # a range without a share may have left nothing: what is there instead is not read
                kept + (_load(mixed, where, shares > 0, columns) * _across(shares, columns.size)).sum(0)
                for kept, columns in zip(sums, cut.values, strict=True)
            )

        sums = tuple(jnp.zeros((columns.size,), jnp.float32) for columns in cut.values)
        for kept, columns in zip(lax.fori_loop(0, pl.cdiv(parts, MERGED), some, sums), cut.values, strict=True):
            out = rest[-1].at[slot, row, head, pl.ds(columns.start, columns.size)]
            gpu.store(out, (kept / total).astype(queries.dtype))

    return pl.pallas_call(
        merge_tree_attention,
        out_shape=jax.ShapeDtypeStruct((batch, t, heads, value_width), queries.dtype),
        grid=(heads, t, batch),
        compiler_params=gpu.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="merge_tree_attention",
    )(mixed, weight, *([] if sinks is None else [sinks.astype(jnp.float32)]))
