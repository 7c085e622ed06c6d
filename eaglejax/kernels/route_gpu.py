"""The router of few rows on Hopper GPUs: two Mosaic kernels, from rows to the tables that the experts kernels read.

The product is float32 arithmetic on the ordinary cores (tensor cores would round the weights to fewer bits, and which experts are chosen
hangs on the last of them): a block holds 64 experts and a range of the columns, all rows at once. Then one block adds the ranges, always in
the same order, scores, and chooses by rounds of a maximum: experts lie along the threads, rows of x side by side, so that a round serves
all rows and no row sees another.
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

from eaglejax.kernels import tiles
from eaglejax.kernels.expert_tables import NOBODY
from eaglejax.kernels.experts_gpu_shape import TILE, Ring, Tables, padded_rows, route_columns, whole_tiles, word_count
from eaglejax.kernels.mosaic import OVER_ROWS, OVER_WEIGHTS, PARAMS, load
from eaglejax.models.config import MoEConfig

TILED_WIDE = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
TAKEN = -(1 << 31)  # below the key of every score


@functools.partial(jax.jit, static_argnames=("config", "with_ids", "interpret"))
def route_gpu(
    x: Float[Array, "n d"],
    weight: Float[Array, "e d"],
    bias: Float[Array, " e"] | None = None,
    correction: Float[Array, " e"] | None = None,
    *,
    config: MoEConfig,
    with_ids: bool = False,
    interpret: Any = None,
) -> Tables:
    """What `models.moe.route` chooses for the rows, as tables; for the shapes that `route_serves` lets through.

    Arguments:
        with_ids: whether ids and weights of each row are given too; biases of the experts need them.
        interpret: how the kernels are interpreted on a CPU, for tests.
    """
    n = x.shape[0]
    if n > 8 and n % 8:  # as for the experts
        x = jnp.pad(x, ((0, -n % 8), (0, 0)))
    choice = tiles.chosen(tiles.Key("route", (config.experts, config.topk, x.shape[1])))
    wide = route_columns(x.shape[1], None if choice is None else Ring(*choice))
    parts = _product(n, x.shape, weight.shape, wide, interpret)(x, weight)
    vectors = [vector for vector in (bias, correction) if vector is not None]
    table, words, *places = _choice(
        n, parts.shape, config, bias is not None, correction is not None, with_ids, interpret
    )(parts, *vectors)
    ids, weights = (place[:, :n].T for place in places) if with_ids else (None, None)
    return Tables(table, words, ids, weights)


@functools.cache
def _product(rows: int, x_shape: tuple[int, int], shape: tuple[int, int], wide: int, interpret: Any):
    """Products over each range of `wide` columns, [ranges, e in whole tiles, padded rows], float32."""
    count, d = shape
    columns, tall = padded_rows(rows), whole_tiles(count)
    steps = wide // TILE

    def route_product(x, weight, parts, w_tiles, x_tiles, full):
        row = pl.multiple_of(lax.axis_index("tile") * TILE, TILE)
        part = lax.axis_index("part")
        none = pl.multiple_of(part * 0, 8)  # rows that x has not become zeros; a start known while tracing is refused
        for step in range(steps):
            over = pl.ds(pl.multiple_of(part * wide + step * TILE, TILE), TILE)
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(row, TILE), over], w_tiles.at[step], full.at[step])
            plgpu.copy_gmem_to_smem(x.at[pl.ds(none, columns), over], x_tiles.at[step], full.at[step])

        def add(step, sums):
            plgpu.barrier_wait(full.at[step])
            tile = load(w_tiles.at[step], layout=plgpu.Layout.WGMMA)
            row_of = lambda index: load(x_tiles.at[step, index], layout=OVER_ROWS).astype(jnp.float32)
            return tuple(
                old + jnp.sum(tile * lax.broadcast_in_dim(row_of(index), (TILE, TILE), (1,)), axis=1)
                for index, old in enumerate(sums)
            )

        zeros = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), OVER_WEIGHTS)
        sums = lax.fori_loop(0, steps, add, (zeros,) * rows)
        column = lax.broadcasted_iota(jnp.int32, (TILE, columns), 1)
        out = jnp.zeros((TILE, columns), jnp.float32)
        for index, one in enumerate(sums):
            out = jnp.where(column == index, lax.broadcast_in_dim(one, (TILE, columns), (0,)), out)
        parts[part, pl.ds(row, TILE)] = plgpu.layout_cast(out, plgpu.Layout.WGMMA)

    return plgpu.kernel(
        route_product,
        out_type=jax.ShapeDtypeStruct((d // wide, tall, columns), jnp.float32),
        scratch_types={
            "w_tiles": plgpu.SMEM((steps, TILE, TILE), jnp.float32, transforms=TILED_WIDE),
            "x_tiles": plgpu.SMEM((steps, columns, TILE), jnp.bfloat16),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=steps),
        },
        grid=(tall // TILE, d // wide),
        grid_names=("tile", "part"),
        compiler_params=PARAMS,
        interpret=interpret,
    )


def _total(parts, together: int):
    """Of the ranges, `together` loaded at a time: the loads do not wait for one another's sums."""
    total: Any = None
    for begin in range(0, parts.shape[0], together):
        indices = range(begin, min(begin + together, parts.shape[0]))
        some = [load(parts.at[index], layout=plgpu.Layout.WGMMA, optimized=False) for index in indices]
        while len(some) > 1:
            some = [sum(some[at + 1 : at + 2], some[at]) for at in range(0, len(some), 2)]
        total = some[0] if total is None else total + some[0]
    return total


def _key(value):
    """Integers in the order of floats."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31)) & 0x7FFFFFFF)


def _unkey(key):
    bits = key ^ (lax.shift_right_arithmetic(key, jnp.full_like(key, 31)) & 0x7FFFFFFF)
    return lax.bitcast_convert_type(bits, jnp.float32)


@functools.cache
def _choice(
    rows: int, shape: tuple[int, int, int], config: MoEConfig, biased: bool, corrected: bool, places: bool, interpret
):
    """Table of weights [e in whole tiles, padded rows], words of the chosen experts; ids and weights [k, padded rows]."""
    _, tall, columns = shape
    count, k, words_wide = config.experts, config.topk, word_count(config.experts)
    vectors = biased + corrected
    whole = (tall, columns)
    together = max(2, 128 * 128 // (tall * columns))  # loads on their way at a time: 128 registers of a thread
    spread = lambda v: lax.broadcast_in_dim(v, whole, (1,))

    def route_choice(*refs, vector_tiles: Any = None, full: Any = None):
        parts, refs = refs[0], refs[1:]
        given, (table, words, *lists) = refs[:vectors], refs[vectors:]
        if vectors:
            for index, ref in enumerate(given):
                for begin in range(0, tall, TILE):  # entries that it has not become zeros
                    start = pl.multiple_of(lax.axis_index("block") + begin, 8)
                    plgpu.copy_gmem_to_smem(
                        ref.at[pl.ds(start, TILE)], vector_tiles.at[index, pl.ds(begin, TILE)], full.at[0]
                    )
        logits = _total(parts, together)
        if vectors:
            plgpu.barrier_wait(full.at[0])
        vector = lambda index: lax.broadcast_in_dim(load(vector_tiles.at[index], layout=OVER_WEIGHTS), whole, (0,))
        if biased:
            logits = logits + vector(0)
        row = lax.broadcasted_iota(jnp.int32, whole, 0)
        real = row < count
        scores = _scores(jnp.where(real, logits, -jnp.inf), config, real, spread)
        choice = scores + vector(vectors - 1) if corrected else scores
        key = _key(choice)
        if config.groups > 1:
            key = _best_groups(choice, key, row, config, spread)
        key = jnp.where(real, key, TAKEN)
        chosen, best = [], jnp.max(key, axis=0)
        for place in range(k):
            most = jnp.max(key, axis=0) if place else best
            one = jnp.min(jnp.where(key == spread(most), row, tall), axis=0)
            key = jnp.where(row == spread(one), TAKEN, key)
            chosen.append(one)
        asked = real & (key == TAKEN) & (lax.broadcasted_iota(jnp.int32, whole, 1) < rows)
        if config.score == "softmax_topk":
            scores = jnp.exp(scores - spread(_unkey(best)))
        if config.score == "softmax_topk" or config.normalise:
            total = jnp.sum(jnp.where(asked, scores, 0.0), axis=0)
            scores = scores / spread(total + 1e-20 if config.score == "sigmoid" else total)
        scores = scores * config.scaling
        table[...] = plgpu.layout_cast(jnp.where(asked, scores, NOBODY), plgpu.Layout.WGMMA)
        anybody = jnp.max(jnp.where(asked, 1, 0), axis=1)
        wide = (tall, words_wide)
        expert, word = lax.broadcasted_iota(jnp.int32, wide, 0), lax.broadcasted_iota(jnp.int32, wide, 1)
        bits = lax.shift_left(lax.broadcast_in_dim(anybody, wide, (0,)), expert & 31)
        bits = jnp.where(lax.shift_right_logical(expert, jnp.full_like(expert, 5)) == word, bits, 0)
        words[...] = jnp.sum(bits, axis=0)
        for slot, one in enumerate(_ascending(chosen) if places else []):
            lists[0][slot] = one
            lists[1][slot] = jnp.sum(jnp.where(row == spread(one), scores, 0.0), axis=0)

    scratch: dict[str, Any] = {}
    if vectors:
        scratch["vector_tiles"] = plgpu.SMEM((vectors, tall), jnp.float32)
        scratch["full"] = plgpu.Barrier(num_arrivals=vectors * (tall // TILE), num_barriers=1)
    outs = [jax.ShapeDtypeStruct(whole, jnp.float32), jax.ShapeDtypeStruct((words_wide,), jnp.int32)]
    if places:
        outs += [jax.ShapeDtypeStruct((k, columns), dtype) for dtype in (jnp.int32, jnp.float32)]
    return plgpu.kernel(
        route_choice,
        out_type=tuple(outs),
        scratch_types=scratch,
        grid=(1,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=interpret,
    )


def _scores(logits, config: MoEConfig, real, spread):
    match config.score:
        case "softmax":
            shares = jnp.where(real, jnp.exp(logits - spread(jnp.max(logits, axis=0))), 0.0)
            return shares / spread(jnp.sum(shares, axis=0))
        case "sigmoid":
            return lax.logistic(logits)
        case "softmax_topk":
            return logits
    raise AssertionError(f"score {config.score!r} was not checked at config time")


def _best_groups(choice, key, row, config: MoEConfig, spread):
    """Keys of experts outside the best groups become that of -inf."""
    size = config.experts // config.groups
    inside, totals = [], []
    for group in range(config.groups):
        mine = (row >= group * size) & (row < (group + 1) * size)
        best = jnp.max(jnp.where(mine, choice, -jnp.inf), axis=0)
        one = jnp.min(jnp.where(mine & (choice == spread(best)), row, config.experts), axis=0)
        second = jnp.max(jnp.where(mine & (row != spread(one)), choice, -jnp.inf), axis=0)
        inside.append(mine)
        totals.append(_key(best + second))
    lowest = (0xFF800000 ^ 0x7FFFFFFF) - (1 << 32)  # of -inf
    for group, mine in enumerate(inside):
        better = [
            jnp.where(other >= totals[group] if index < group else other > totals[group], 1, 0)
            for index, other in enumerate(totals)
            if index != group
        ]
        kept = functools.reduce(lambda a, b: a + b, better) < config.topk_groups
        key = jnp.where(mine & (spread(jnp.where(kept, 1, 0)) == 0), lowest, key)
    return key


def _ascending(ids: list) -> list:
    """Each row's ids in ascending order, by counting."""
    count = lambda one: functools.reduce(lambda a, b: a + b, [jnp.where(other < one, 1, 0) for other in ids])
    places = [count(one) for one in ids]
    return [
        functools.reduce(
            lambda a, b: a + b, [jnp.where(place == slot, one, 0) for one, place in zip(ids, places, strict=True)]
        )
        for slot in range(len(ids))
    ]
