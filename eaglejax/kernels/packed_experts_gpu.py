"""The experts kernels for packed weights: bytes and scales come through the ring and are widened to bfloat16 in shared memory.

A step is 256 columns of a weight in two parts of 128 that are widened in turn, so that the tensor cores multiply one
while the other is being widened. A sum does not mind the order of its columns: the low halves of a step's bytes make
one part and the high halves the other, and the rows of x have their even columns before their odd ones to match.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from eaglejax.kernels.expert_tables import chosen_words, weight_table
from eaglejax.kernels.experts_gpu import launch
from eaglejax.kernels.experts_gpu_shape import PART, TILE, Parts, Ring, Tables, packed_ring, padded_rows
from eaglejax.kernels.mosaic import load
from eaglejax.models.packed import PackedWeight

BYTES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
# tiles of 16 columns: those of a group of 32 that share a part
NARROW = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
GROUP = 16  # columns of a part under one scale of a 4-bit weight
LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X
OVER_ROWS = LAYOUT.reduce(1)


@dataclass(frozen=True)
class Packed(ABC):
    """What both kinds have in common; takes the place of `experts_gpu.Plain`.

    Attributes:
        row_bytes: bytes of one row of one step in the ring.
        tiled: transforms of what is multiplied.
    """

    row_bytes: ClassVar[int]
    tiled: ClassVar[Any]

    def ring(self, columns: int, *shape: int) -> Ring:
        return packed_ring(columns, *shape, size=self.row_bytes)

    @abstractmethod
    def buffers(self, stages: int, tile: int) -> dict[str, Any]:
        """Shared memory for what comes of the weight, and what its widening needs."""

    @abstractmethod
    def copies(self, tiles: int) -> int:
        """Of one step with so many tiles of TILE rows."""

    def order(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        """The columns of the rows as `bring` reads them."""
        return x

    @abstractmethod
    def bring(self, weight: tuple, tiles: list[tuple], row, step, x_at, buffers: dict[str, Any], into, full) -> None:
        """Starts the copies of one step: TILE rows from `row` of each of `tiles`, and the same columns of x."""

    @abstractmethod
    def prepare(self, buffers: dict[str, Any], have) -> None:
        """What is done once for both parts of a step."""

    @abstractmethod
    def widen(self, buffers: dict[str, Any], have, part: int) -> None:
        """Writes one part of a step to `wide`."""

    def scratch(self, ring: Ring, tile: int, columns: int) -> dict[str, Any]:
        return {
            **self.buffers(ring.stages, tile),
            "wide": plgpu.SMEM((2, tile, PART), jnp.bfloat16, transforms=self.tiled),
            "x_ring": plgpu.SMEM((ring.stages, 2, columns, PART), jnp.bfloat16, transforms=self.tiled),
        }

    def multiply(self, acc, buffers: dict[str, Any], have) -> None:
        for part in (0, 1):
            if part == 0:
                self.prepare(buffers, have)
            # the product that read this part's tile is done; a warp widens the rows that its own products read
            plgpu.wgmma_wait(1)
            self.widen(buffers, have, part)
            plgpu.commit_smem()
            plgpu.wgmma(acc, buffers["wide"].at[part], buffers["x_ring"].at[have, part].transpose((1, 0)))
        # both products of the step before are done, and all threads have passed a barrier since they read its bytes


@dataclass(frozen=True)
class Int4(Packed):
    """Two to a byte, a bfloat16 scale for 32 along a row."""

    half: int  # columns of a weight that lie in the low halves of its bytes

    row_bytes = PART + 2 * PART // GROUP
    tiled = NARROW

    def buffers(self, stages: int, tile: int) -> dict[str, Any]:
        return {
            "w_ring": plgpu.SMEM((stages, tile, PART), jnp.uint8, transforms=BYTES),
            "s_ring": plgpu.SMEM((stages, tile, PART // GROUP), jnp.bfloat16),
            "factors": plgpu.SMEM((PART // GROUP, tile), jnp.bfloat16),
        }

    def copies(self, tiles: int) -> int:
        return 2 * tiles + 2

    def order(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        return jnp.concatenate((x[..., 0::2], x[..., 1::2]), axis=-1)

    def bring(self, weight: tuple, tiles: list[tuple], row, step, x_at, buffers: dict[str, Any], into, full) -> None:
        values, scale = weight
        start = pl.multiple_of(step * PART, PART)
        groups = pl.ds(pl.multiple_of(step * (PART // GROUP), 8), PART // GROUP)
        for number, tile in enumerate(tiles):
            rows, to = pl.ds(row, TILE), pl.ds(number * TILE, TILE)
            plgpu.copy_gmem_to_smem(values.at[(*tile, rows, pl.ds(start, PART))], buffers["w_ring"].at[into, to], full)
            plgpu.copy_gmem_to_smem(scale.at[(*tile, rows, groups)], buffers["s_ring"].at[into, to], full)
        for part in (0, 1):
            over = pl.ds(pl.multiple_of(part * self.half + start, 64), PART)
            plgpu.copy_gmem_to_smem(x_at(over), buffers["x_ring"].at[into, part], full)

    def prepare(self, buffers: dict[str, Any], have) -> None:
        """Turns the scales round: one group of all rows is read at a time, and only what lies together can be."""
        scale = load(buffers["s_ring"].at[have], layout=plgpu.Layout.WGMMA, optimized=False)
        buffers["factors"].transpose((1, 0))[...] = plgpu.layout_cast(scale, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

    def widen(self, buffers: dict[str, Any], have, part: int) -> None:
        raw = load(buffers["w_ring"].at[have], layout=LAYOUT)
        raw = lax.bitcast_convert_type(raw, jnp.int8)
        # in bfloat16 throughout: a nibble times a scale is rounded once there too. 8-bit values cannot be shifted
        if part:
            value = ((raw ^ -128) & -16).astype(jnp.bfloat16) * 0.0625
        else:
            value = (raw & 15).astype(jnp.bfloat16) - 8
        scaled = []
        for group in range(PART // GROUP):
            columns = slice(group * GROUP, (group + 1) * GROUP)
            scale = load(buffers["factors"].at[group], layout=OVER_ROWS, optimized=False)
            factors = lax.broadcast_in_dim(scale, (scale.shape[0], GROUP), (0,))
            scaled.append(value[:, columns] * factors)
        buffers["wide"][part] = lax.concatenate(scaled, 1)  # one store: each has barriers before and after it


@dataclass(frozen=True)
class Fp8(Packed):
    """e4m3, a float32 scale for a block of `rows` (whole tiles) by 128."""

    rows: int

    row_bytes = 2 * PART + 4
    tiled = WIDE

    def buffers(self, stages: int, tile: int) -> dict[str, Any]:
        return {
            "w_ring": plgpu.SMEM((stages, 2, tile, PART), jnp.float8_e4m3fn, transforms=BYTES),
            "s_ring": plgpu.SMEM((stages, tile // TILE, 32), jnp.float32),
        }

    def copies(self, tiles: int) -> int:
        return 3 * tiles + 2

    def bring(self, weight: tuple, tiles: list[tuple], row, step, x_at, buffers: dict[str, Any], into, full) -> None:
        values, scale = weight
        for number, tile in enumerate(tiles):
            # two scales are wanted and four are the least that is copied; those beyond the last are zeros
            few = scale.at[(*tile, lax.div(row, jnp.int32(self.rows)), pl.ds(step * 2, 4))]
            plgpu.copy_gmem_to_smem(few, buffers["s_ring"].at[into, number, pl.ds(0, 4)], full)
        for part in (0, 1):
            over = pl.ds(pl.multiple_of(step * (2 * PART) + part * PART, PART), PART)
            for number, tile in enumerate(tiles):
                to = buffers["w_ring"].at[into, part, pl.ds(number * TILE, TILE)]
                plgpu.copy_gmem_to_smem(values.at[(*tile, pl.ds(row, TILE), over)], to, full)
            plgpu.copy_gmem_to_smem(x_at(over), buffers["x_ring"].at[into, part], full)

    def prepare(self, buffers: dict[str, Any], have) -> None:
        pass  # scales are read as they came

    def widen(self, buffers: dict[str, Any], have, part: int) -> None:
        scaled = []
        for number in range(buffers["wide"].shape[1] // TILE):
            rows = pl.ds(number * TILE, TILE)
            value = load(buffers["w_ring"].at[have, part, rows], layout=LAYOUT).astype(jnp.float32)
            scaled.append((value * buffers["s_ring"][have, number, part]).astype(jnp.bfloat16))
        buffers["wide"][part] = lax.concatenate(scaled, 0)


def packed_form(weight: PackedWeight) -> Packed:
    """Of a weight that `packed_serves` lets through."""
    out, width = weight.shape[-2:]
    if weight.packing.kind == "int4":
        return Int4(width // 2)
    return Fp8(weight.packing.grid(out, width)[0])


def packed_experts_gpu(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate_up: PackedWeight,
    down: PackedWeight,
    gate_up_bias: Float[Array, "e 2 f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    activation: str = "silu",
    interpret: Any = None,
) -> Parts:
    """`experts` (the same contract, but for the sum of the parts) for what `serves` and `packed_serves` let through.

    Weights have the values of `PackedWeight.take`, bit for bit.
    """
    return _experts(
        x,
        ids,
        weights,
        (gate_up.values[...], gate_up.scale[...]),
        (down.values[...], down.scale[...]),
        gate_up_bias,
        down_bias,
        shape=(down.shape[0], down.shape[2], down.shape[1]),
        forms=(packed_form(gate_up), packed_form(down)),
        activation=activation,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("shape", "forms", "activation", "interpret"))
def _experts(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate_up: tuple[Shaped[Array, "..."], ...],
    down: tuple[Shaped[Array, "..."], ...],
    gate_up_bias: Float[Array, "e 2 f"] | None,
    down_bias: Float[Array, "e d"] | None,
    *,
    shape: tuple[int, int, int],
    forms: tuple[Packed, Packed],
    activation: str,
    interpret: Any,
) -> Parts:
    words, table = chosen_words(ids, shape[0]), weight_table(ids, weights, shape[0], padded_rows(x.shape[0]))
    return launch(
        x,
        Tables(table, words, ids, weights),
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        shape=shape,
        forms=forms,
        topk=ids.shape[1],
        activation=activation,
        interpret=interpret,
    )
