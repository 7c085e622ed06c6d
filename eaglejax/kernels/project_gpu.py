"""Projections of few rows on Hopper GPUs: one Mosaic kernel multiplies the same rows with one or several weights.

Tensor cores multiply tiles of 64 rows of a weight (rows of the product) with all rows of x at once (its columns, padded to 8, 16, 32 or
64). Weights stream through a ring of buffers that never drains between tiles. Where the weights have too few tiles for all cores, the
blocks of a cluster share a tile's sum: each leaves its part in device memory, which the L2 holds, and the first adds them in order. What a
row gets does not depend on the rows beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Shaped

from eaglejax.kernels import tiles
from eaglejax.kernels.experts_gpu_shape import Ring, padded_rows
from eaglejax.kernels.mosaic import PARAMS, load
from eaglejax.kernels.project import TILE, Cut, cut_of

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@functools.partial(jax.jit, static_argnames=("accumulate", "parts", "interpret"))
def project_gpu(
    x: Shaped[Array, "*lead d"],
    *weights: Shaped[Array, "... d"],
    accumulate: DTypeLike | None = None,
    parts: int | None = None,
    interpret: Any = None,
) -> tuple[Shaped[Array, "..."], ...]:
    """`layers.project` of x with each of the weights, for the shapes that `project.serves_shapes` lets through.

    Arguments:
        accumulate: the dtype of the results, bfloat16 (by default) or float32.
        parts: as of `cut_of`.
        interpret: how the kernel is interpreted on a CPU, for tests.
    """
    lead, d = x.shape[:-1], x.shape[-1]
    flat, flats = x.reshape(-1, d), [weight.reshape(-1, d) for weight in weights]
    rows = flat.shape[0]
    widths = [weight.shape[0] for weight in flats]
    choice = tiles.chosen(tiles.Key("project", (d, *widths))) if parts is None else None
    cut = cut_of(rows, d, widths, parts, None if choice is None else Ring(*choice))
    if rows > 8 and rows % 8:  # missing rows are made up by the copies, but only whole tiles of 8 beyond the first
        flat = jnp.pad(flat, ((0, -rows % 8), (0, 0)))
    outs = _kernel(flat.shape[0], cut, jnp.dtype(accumulate or x.dtype), interpret)(flat, *flats)
    return tuple(out[:rows].reshape(*lead, *weight.shape[:-1]) for out, weight in zip(outs, weights, strict=False))


@functools.cache
def _kernel(rows: int, cut: Cut, dtype: Any, interpret: Any):
    """The products [rows, out] of all weights and, where sums are shared, their parts.

    Block b does tiles b, b + blocks and so on of all weights, laid end to end.
    """
    count, columns, steps, stages, parts = len(cut.tiles), padded_rows(rows), cut.steps, cut.stages, cut.parts
    every, blocks = sum(cut.tiles), cut.blocks
    firsts = [sum(cut.tiles[:index]) for index in range(count)]
    split = parts > 1

    def project_rows(*refs, w_ring, x_ring, out, full, **shared: Any):
        x, weights, outs = refs[0], refs[1 : 1 + count], refs[1 + count : 1 + 2 * count]
        block = lax.axis_index("block")
        part = lax.axis_index("part") if split else jnp.int32(0)
        begin = lax.div(part * steps, jnp.int32(parts))
        mine = lax.div((part + 1) * steps, jnp.int32(parts)) - begin  # steps
        tasks = lax.div(every - block + (blocks - 1), jnp.int32(blocks))
        total = tasks * mine
        # rows that x has not are filled with zeros, and left out of the results; a start known while tracing would be refused
        all_rows = pl.ds(pl.multiple_of(block * 0, 8), columns)

        def per_weight(tile, do):
            """`do` with the weight that this tile is of, and its rows."""
            for index, first in enumerate(firsts):

                @pl.when((tile >= first) & (tile < first + cut.tiles[index]))
                def _(index=index, first=first):
                    do(index, pl.ds(pl.multiple_of((tile - first) * TILE, TILE), TILE))

        def issue(ahead):
            into, number = lax.rem(ahead, jnp.int32(stages)), lax.div(ahead, mine)
            over = pl.ds(pl.multiple_of((begin + ahead - number * mine) * cut.step, 64), cut.step)
            per_weight(
                block + number * blocks,
                lambda index, at: plgpu.copy_gmem_to_smem(weights[index].at[at, over], w_ring.at[into], full.at[into]),
            )
            plgpu.copy_gmem_to_smem(x.at[all_rows, over], x_ring.at[into], full.at[into])

        for ahead in range(stages - 1):

            @pl.when(ahead < total)
            def _(ahead=ahead):
                issue(jnp.int32(ahead))

        def product(number, acc):
            def one(step, _):
                index = number * mine + step
                have = lax.rem(index, jnp.int32(stages))
                plgpu.barrier_wait(full.at[have])
                plgpu.wgmma(acc, w_ring.at[have], x_ring.at[have].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the step before this one is done: its buffers are free

                @pl.when(index + (stages - 1) < total)
                def _():
                    issue(index + (stages - 1))

            lax.fori_loop(0, mine, one, None)
            return acc[...]

        def leave(value, tile):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out.transpose((1, 0))[...] = plgpu.layout_cast(value.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            per_weight(tile, lambda index, at: plgpu.copy_smem_to_gmem(out, outs[index].at[all_rows, at]))

        def task(number, _):
            tile = block + number * blocks
            value = pl.run_scoped(functools.partial(product, number), plgpu.ACC((TILE, columns), jnp.float32))
            if not split:
                leave(value, tile)
                return
            store, sums, others = refs[1 + 2 * count], shared["sums"], shared["others"]
            landed, written = shared["landed"], shared["written"]

            @pl.when(part > 0)
            def _():
                sums.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(sums, store.at[block, part - 1])

            # written, not only read; and none may leave while others still tell it that they are done
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)

            @pl.when(part == 0)
            def _():
                for other in range(parts - 1):
                    plgpu.copy_gmem_to_smem(store.at[block, other], others.at[other], landed)
                plgpu.barrier_wait(landed)
                whole = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
                for other in range(parts - 1):
                    whole = whole + load(
                        others.at[other].transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
                    )
                leave(whole, tile)

        lax.fori_loop(0, tasks, task, None)
        plgpu.wait_smem_to_gmem(0)

    bf16, wide = jnp.bfloat16, jnp.float32
    shapes = [jax.ShapeDtypeStruct((rows, each * TILE), dtype) for each in cut.tiles]
    scratch: dict[str, Any] = {
        "w_ring": plgpu.SMEM((stages, TILE, cut.step), bf16, transforms=TILED),
        "x_ring": plgpu.SMEM((stages, columns, cut.step), bf16, transforms=TILED),
        "out": plgpu.SMEM((columns, TILE), dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    options: dict[str, Any] = {}
    if split:
        shapes.append(jax.ShapeDtypeStruct((every, parts - 1, columns, TILE), wide))
        scratch |= {
            "sums": plgpu.SMEM((columns, TILE), wide),
            "others": plgpu.SMEM((parts - 1, columns, TILE), wide),
            "landed": plgpu.Barrier(num_arrivals=parts - 1),
            "written": plgpu.ClusterBarrier(collective_axes=("part",)),
        }
        options = {"cluster": (parts,), "cluster_names": ("part",)}
    return plgpu.kernel(
        project_rows,
        out_type=tuple(shapes),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=interpret,
        **options,
    )
