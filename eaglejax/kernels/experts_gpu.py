"""Feed-forward of routed experts for few rows on Hopper GPUs: two Mosaic kernels that read the chosen experts and no others.

Tensor cores multiply tiles of the weights (rows of a weight are rows of the product) with all rows of x at once (its columns, padded to 8,
16, 32 or 64): every chosen expert multiplies every row, and what a row did not ask for is dropped by a select. Weights stream through a
ring of buffers that never drains between experts. A row's sum runs in ascending order of expert within fixed parts of the width; experts
that only other rows chose add exact zeros to it, so what a row gets does not depend on the rows beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from eaglejax.kernels import tiles
from eaglejax.kernels.expert_tables import NOBODY, chosen_words, expert_of, how_many, weight_table
from eaglejax.kernels.experts import GPT_OSS_ALPHA, GPT_OSS_LIMIT
from eaglejax.kernels.experts_gpu_shape import BLOCKS, TILE, Parts, Ring, Tables, down_ring, gateup_ring, padded_rows
from eaglejax.kernels.mosaic import OVER_ROWS, OVER_WEIGHTS, PARAMS, load

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def experts_gpu(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate_up: Float[Array, "e 2 f d"],
    down: Float[Array, "e d f"],
    gate_up_bias: Float[Array, "e 2 f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    activation: str = "silu",
    interpret: Any = None,
) -> Parts:
    """`experts` (the same contract, but for the sum of the parts) for the shapes that `serves` lets through.

    Arguments:
        interpret: how the kernels are interpreted on a CPU, for tests.

    Compiled once for all layers of one shape.
    """
    count = down.shape[0]
    words, table = chosen_words(ids, count), weight_table(ids, weights, count, padded_rows(x.shape[0]))
    return experts_of_tables(
        x,
        Tables(table, words, ids, weights),
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        topk=ids.shape[1],
        activation=activation,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("topk", "activation", "interpret"))
def experts_of_tables(
    x: Float[Array, "n d"],
    tables: Tables,
    gate_up: Float[Array, "e 2 f d"],
    down: Float[Array, "e d f"],
    gate_up_bias: Float[Array, "e 2 f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    topk: int,
    activation: str = "silu",
    interpret: Any = None,
) -> Parts:
    """`experts_gpu` of rows whose experts stand in tables; with ids and weights where there is a `down_bias`."""
    count, d, f = down.shape
    first, second = (plain(tiles.Key(name, (count, topk, d, f))) for name in ("gateup", "down"))
    return launch(
        x,
        tables,
        (gate_up,),
        (down,),
        gate_up_bias,
        down_bias,
        shape=(count, f, d),
        forms=(first, second),
        topk=topk,
        activation=activation,
        interpret=interpret,
    )


def launch(
    x: Float[Array, "n d"],
    tables: Tables,
    gate_up: tuple[Shaped[Array, "..."], ...],
    down: tuple[Shaped[Array, "..."], ...],
    gate_up_bias: Float[Array, "e 2 f"] | None,
    down_bias: Float[Array, "e d"] | None,
    *,
    shape: tuple[int, int, int],
    forms: tuple[Any, Any],
    topk: int,
    activation: str,
    interpret: Any,
) -> Parts:
    """Both kernels, for weights in any form; a `down_bias` is added here, to the sum of their parts.

    Arguments:
        gate_up, down: the arrays that each weight lies in.
        shape: experts, width of one, width of x.
        forms: how gate and up, and how down are brought and multiplied: `Plain`, or what stands in for it.
    """
    (count, f, d), n = shape, x.shape[0]
    columns, slots = padded_rows(n), min(count, n * topk)
    biases = () if gate_up_bias is None else (gate_up_bias,)
    if n > 8 and n % 8:  # missing rows are made up by the copies, but only whole tiles of 8 beyond the first
        x = jnp.pad(x, ((0, -n % 8), (0, 0)))
    first = _gateup(x.shape[0], slots, (count, 2, f, d), activation, len(biases), interpret, forms[0])
    inner, chosen = first(forms[0].order(x), tables.table, tables.words, *gate_up, *biases)
    parts = Parts(
        _down(columns, slots, (count, d, f), interpret, forms[1])(forms[1].order(inner), chosen, tables.words, *down)
    )
    if down_bias is None:
        return parts
    total, ids, weights = parts.total(n), tables.ids, tables.weights
    assert ids is not None and weights is not None
    for place in range(topk):
        bias = jnp.take(down_bias, ids[:, place], axis=0, mode="clip").astype(jnp.float32)
        total = total + jnp.where(ids[:, place, None] < count, weights[:, place, None] * bias, 0)
    return Parts(total[None])


def _act(activation: str, gate, up):
    match activation:
        case "silu":
            return gate * lax.logistic(gate) * up
        case "gpt_oss":
            gate = jnp.minimum(gate, GPT_OSS_LIMIT)
            up = jnp.minimum(jnp.maximum(up, -GPT_OSS_LIMIT), GPT_OSS_LIMIT)
            return gate * lax.logistic(gate * GPT_OSS_ALPHA) * (up + 1.0)
    raise AssertionError(f"expert activation {activation!r} was not checked at config time")


@dataclass(frozen=True)
class Plain:
    """How tiles of a bfloat16 weight come and are multiplied; `packed_experts_gpu` has the like for packed ones.

    choice: how they are cut, in place of the rule.
    """

    choice: Ring | None = None

    def ring(self, columns: int, *shape: int) -> Ring:
        """For [f, d] of gate and up or for [d, f] of down, by how many numbers follow."""
        if len(shape) == 1:
            return gateup_ring(columns, *shape, choice=self.choice)
        return down_ring(columns, *shape, choice=self.choice)

    def scratch(self, ring: Ring, tile: int, columns: int) -> dict[str, Any]:
        return {
            "w_ring": plgpu.SMEM((ring.stages, tile, ring.step), jnp.bfloat16, transforms=TILED),
            "x_ring": plgpu.SMEM((ring.stages, columns, ring.step), jnp.bfloat16, transforms=TILED),
        }

    def copies(self, tiles: int) -> int:
        """Of one step with so many tiles of TILE rows."""
        return tiles + 1

    def order(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        """The columns of the rows as `bring` reads them."""
        return x

    def bring(self, weight: tuple, tiles: list[tuple], row, step, x_at, buffers: dict[str, Any], into, full) -> None:
        """Starts the copies of one step: TILE rows from `row` of each of `tiles`, and the same columns of x."""
        width = buffers["w_ring"].shape[-1]
        over = pl.ds(pl.multiple_of(step * width, 64), width)
        for number, tile in enumerate(tiles):
            target = buffers["w_ring"].at[into, pl.ds(number * TILE, TILE)]
            plgpu.copy_gmem_to_smem(weight[0].at[(*tile, pl.ds(row, TILE), over)], target, full)
        plgpu.copy_gmem_to_smem(x_at(over), buffers["x_ring"].at[into], full)

    def multiply(self, acc, buffers: dict[str, Any], have) -> None:
        """Adds one step that has come; afterwards no step before it is in use."""
        plgpu.wgmma(acc, buffers["w_ring"].at[have], buffers["x_ring"].at[have].transpose((1, 0)))
        plgpu.wgmma_wait(1)  # the step before this one is done: its buffers are free


def plain(key: tiles.Key) -> Plain:
    """With what is chosen for this kernel and shape."""
    choice = tiles.chosen(key)
    return Plain(None if choice is None else Ring(*choice))


@functools.cache
def _gateup(
    rows: int, slots: int, shape: tuple[int, int, int, int], activation: str, biases: int, interpret: Any, form: Any
):
    """Weighted inner values [slots, columns, f] of the chosen experts, in their order, and which experts they are [slots].

    A task is one chosen expert and TILE rows of its gate and of its up; block b does tasks b, b + BLOCKS and so on.
    """
    count, _, f, d = shape
    columns = padded_rows(rows)
    ring, each = form.ring(columns, d), f // TILE  # tasks of an expert
    steps, stages, dtype = d // ring.step, ring.stages, jnp.bfloat16

    def experts_gateup(*refs, out, full, **buffers):
        x, table, words_ref, *weight, inner, chosen = refs
        bias = [weight.pop() for _ in range(biases)]
        block = lax.axis_index("block")
        words = [words_ref[index] for index in range(-(-count // 32))]
        tasks = lax.div(how_many(words) * each - block + (BLOCKS - 1), jnp.int32(BLOCKS))
        tasks = jnp.maximum(tasks, 0)
        total = tasks * steps

        def task_at(index):
            """Its slot, expert and first row."""
            place = block + index * BLOCKS
            slot = lax.div(place, jnp.int32(each))
            return slot, expert_of(words, slot), pl.multiple_of((place - slot * each) * TILE, TILE)

        def issue(expert, row, step, index):
            into = lax.rem(index, jnp.int32(stages))
            # rows that x has not are filled with zeros; a start known while tracing would be refused
            x_at = lambda over: x.at[pl.ds(pl.multiple_of(block * 0, 8), columns), over]
            halves = [(expert, 0), (expert, 1)]
            form.bring(tuple(weight), halves, row, step, x_at, buffers, into, full.at[into])

        first = task_at(jnp.int32(0))
        for ahead in range(stages - 1):  # a task has at least as many steps

            @pl.when(ahead < total)
            def _(ahead=ahead):
                issue(first[1], first[2], jnp.int32(ahead), jnp.int32(ahead))

        def task(number, now):
            slot, expert, row = now
            row = pl.multiple_of(row, TILE)  # what is known of it does not survive the loop
            then = task_at(number + 1)

            def product(acc):
                def one(step, _):
                    index = number * steps + step
                    have = lax.rem(index, jnp.int32(stages))
                    plgpu.barrier_wait(full.at[have])
                    form.multiply(acc, buffers, have)

                    @pl.when(index + (stages - 1) < total)
                    def _():
                        ahead = step + (stages - 1)
                        here = ahead < steps
                        issue(
                            jnp.where(here, expert, then[1]),
                            pl.multiple_of(jnp.where(here, row, then[2]), TILE),
                            jnp.where(here, ahead, ahead - steps),
                            index + (stages - 1),
                        )

                lax.fori_loop(0, steps, one, None)
                return acc[...]

            both = pl.run_scoped(product, plgpu.ACC((2 * TILE, columns), jnp.float32))
            gate, up = both[:TILE], both[TILE:]
            spread = lambda v, axis: lax.broadcast_in_dim(v, (TILE, columns), (axis,))
            if bias:
                at = lambda half: load(bias[0].at[expert, half, pl.ds(row, TILE)], layout=OVER_WEIGHTS, optimized=False)
                gate = gate + spread(at(0).astype(jnp.float32), 0)
                up = up + spread(at(1).astype(jnp.float32), 0)
            share = spread(load(table.at[expert], layout=OVER_ROWS, optimized=False), 1)
            # select, not multiply: a row that is inf or NaN may not spoil what it did not choose
            value = jnp.where(share == NOBODY, 0.0, _act(activation, gate, up) * share)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out.transpose((1, 0))[...] = plgpu.layout_cast(value.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, inner.at[slot, :, pl.ds(row, TILE)])

            @pl.when(row == 0)
            def _():
                chosen[slot] = expert

            return then

        lax.fori_loop(0, tasks, task, first)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        experts_gateup,
        out_type=(
            jax.ShapeDtypeStruct((slots, columns, f), dtype),
            jax.ShapeDtypeStruct((slots,), jnp.int32),
        ),
        scratch_types={
            **form.scratch(ring, 2 * TILE, columns),
            "out": plgpu.SMEM((columns, TILE), dtype, transforms=TILED),
            "full": plgpu.Barrier(num_arrivals=form.copies(2), num_barriers=stages),
        },
        grid=(BLOCKS,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=interpret,
    )


@functools.cache
def _down(columns: int, slots: int, shape: tuple[int, int, int], interpret: Any, form: Any):
    """Sums over the chosen experts, [parts, columns, d]; each part is over its own range of the width of every expert.

    A block is TILE rows of all down weights and one part.
    """
    count, d, f = shape
    ring = form.ring(columns, d, f)
    steps, stages, parts = f // ring.step, ring.stages, ring.parts

    def experts_down(inner, chosen, words_ref, *weight, out, full, **buffers):
        *weight, sums = weight
        row = pl.multiple_of(lax.axis_index("tile") * TILE, TILE)
        part = lax.axis_index("part")
        begin = lax.div(part * steps, jnp.int32(parts))
        mine = lax.div((part + 1) * steps, jnp.int32(parts)) - begin
        total = how_many([words_ref[index] for index in range(-(-count // 32))]) * mine

        def issue(index):
            into = lax.rem(index, jnp.int32(stages))
            slot = lax.div(index, mine)
            x_at = lambda over: inner.at[slot, :, over]
            step = begin + index - slot * mine
            form.bring(tuple(weight), [(chosen[slot],)], row, step, x_at, buffers, into, full.at[into])

        for ahead in range(stages - 1):

            @pl.when(ahead < total)
            def _(ahead=ahead):
                issue(jnp.int32(ahead))

        def product(acc):
            def one(index, _):
                have = lax.rem(index, jnp.int32(stages))
                plgpu.barrier_wait(full.at[have])
                form.multiply(acc, buffers, have)

                @pl.when(index + (stages - 1) < total)
                def _():
                    issue(index + (stages - 1))

            lax.fori_loop(0, total, one, None)
            return acc[...]

        value = pl.run_scoped(product, plgpu.ACC((TILE, columns), jnp.float32))
        out.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, sums.at[part, :, pl.ds(row, TILE)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        experts_down,
        out_type=jax.ShapeDtypeStruct((parts, columns, d), jnp.float32),
        scratch_types={
            **form.scratch(ring, TILE, columns),
            "out": plgpu.SMEM((columns, TILE), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=form.copies(1), num_barriers=stages),
        },
        grid=(d // TILE, parts),
        grid_names=("tile", "part"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
