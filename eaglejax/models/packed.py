"""Weights that stay quantised on the device and are widened only where they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Shaped, UInt8

from eaglejax.errors import ConfigError

Kind = Literal["fp8", "int8", "int4", "mxfp4"]
# what `values` holds; the 4-bit kinds lie two to a byte
VALUE_DTYPES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8, "int4": jnp.uint8, "mxfp4": jnp.uint8}


@dataclass(frozen=True)
class Packing:
    """How a weight [*lead, out, in] is quantised.

    Attributes:
        kind: "fp8" (e4m3), "int8", "int4" (nibble - 8) or "mxfp4" (e2m1), all times a scale per block.
        rows, columns: the block that shares a scale, counted from the first row and column of every [out, in]; blocks
            at the end may be partial. A scale per row has rows 1 and columns as wide as the weight.
        scale: dtype of the scales as they are kept: "float32", "bfloat16", "float16", or "uint8" for the exponents
            (e8m0) of mxfp4.
    """

    kind: Kind
    rows: int
    columns: int
    scale: str = "float32"

    @property
    def per_byte(self) -> int:
        """Weights that lie along `in` in one element of `values`."""
        return 2 if self.kind in ("int4", "mxfp4") else 1

    def grid(self, out: int, width: int) -> tuple[int, int]:
        """Rows and columns under one of the scales that are kept for a part [out, width] of the weight.

        Finer than the block where the part cuts blocks: then a block's scale is repeated, so that every part carries
        the scales of its own weights and no part needs to know where in a block it begins.
        """
        return math.gcd(self.rows, out), math.gcd(self.columns, width)


class PackedWeight(nnx.Module):
    """Takes the place of an nnx.Param [*lead, out, in] of a quantised tensor.

    `values` [*lead, out, in], or [*lead, out, in / 2] where two lie in a byte (the first in the low half); `scale`
    [*lead, out / r, in / c] with r, c of `Packing.grid`. Both carry the axes and mesh axes of the Param.
    Indexing gives plain weights in the model's dtype, as indexing the Param would: `[...]` all of them, `[i]` those of
    one index of the first axis, of which nothing else is read.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        packing: Packing,
        *,
        dtype: DTypeLike,
        metadata: Mapping[str, Any] | None = None,
    ):
        *lead, out, width = shape
        if width % packing.per_byte:
            raise ConfigError(
                f"an odd number of {packing.kind} weights cannot lie two to a byte",
                found=list(shape),
                expected="an even last axis on each device",
                fix="use a mesh whose model axis leaves whole bytes",
            )
        self.packing = packing
        self.dtype = jnp.dtype(dtype)
        r, c = packing.grid(out, width)
        values = jnp.zeros((*lead, out, width // packing.per_byte), VALUE_DTYPES[packing.kind])
        self.values = nnx.Param(values, **(metadata or {}))
        self.scale = nnx.Param(jnp.zeros((*lead, out // r, width // c), packing.scale), **(metadata or {}))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain weight."""
        *lead, width = self.values.shape
        return (*lead, width * self.packing.per_byte)

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    def dense(self, dtype: DTypeLike) -> Float[Array, "*shape"]:
        """All weights, multiplied by their scales in float32 and rounded once, to `dtype`."""
        return dequantise(self.values[...], self.scale[...], self.packing, dtype)

    def __getitem__(self, index: Any) -> Float[Array, "*shape"]:
        if index is Ellipsis:
            return self.dense(self.dtype)
        return self._dequantised(lambda table: table[index])

    def take(self, ids: Int[Array, "*n"]) -> Float[Array, "*shape"]:
        """The plain weights of some indices of the first axis; ids out of range give the nearest."""
        return self._dequantised(lambda table: jnp.take(table, ids, axis=0, mode="clip"))

    def _dequantised(self, choose: Callable[[Array], Array]) -> Float[Array, "*shape"]:
        # As bytes: a compiler without float8 of its own (the CPU's) widens the whole table before it takes a part.
        raw = lax.bitcast_convert_type(self.values[...], jnp.uint8)
        values = lax.bitcast_convert_type(choose(raw), VALUE_DTYPES[self.packing.kind])
        return dequantise(values, choose(self.scale[...]), self.packing, self.dtype)


def dequantise(
    values: Shaped[Array, "*lead out columns"],
    scale: Shaped[Array, "*lead r c"],
    packing: Packing,
    dtype: DTypeLike,
) -> Float[Array, "*lead out width"]:
    """value * scale in float32, rounded once to `dtype`; the granularity of the scales follows from the two shapes."""
    with jax.named_scope("dequantise"):
        match packing.kind:
            case "fp8" | "int8":
                wide = values.astype(jnp.float32)
            case "int4":
                wide = _nibbles(values).astype(jnp.float32) - 8.0
            case "mxfp4":
                wide = _e2m1(_nibbles(values))
        factors = _exponents(scale) if packing.scale == "uint8" else scale.astype(jnp.float32)
        *lead, out, width = wide.shape
        r, c = factors.shape[-2:]
        blocks = wide.reshape(*lead, r, out // r, c, width // c) * factors[..., :, None, :, None]
        return blocks.reshape(wide.shape).astype(dtype)


def _nibbles(values: UInt8[Array, "*lead n"]) -> UInt8[Array, "*lead 2*n"]:
    both = jnp.stack((values & jnp.uint8(15), values >> jnp.uint8(4)), axis=-1)
    return both.reshape(*values.shape[:-1], -1)


def _e2m1(codes: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, by arithmetic on integers: a table would be a gather."""
    codes = codes.astype(jnp.int32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    size = halves.astype(jnp.float32) * 0.5
    return jnp.where((codes & 8) != 0, -size, size)


def _exponents(scale: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """2^(s - 127), by placing s in the exponent of a float32; 0 would be a zero there and is 2^-127."""
    bits = jnp.where(scale == 0, jnp.uint32(1 << 22), scale.astype(jnp.uint32) << jnp.uint32(23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def pack(module: nnx.Module, packings: Mapping[str, Packing]) -> None:
    """Replaces the parameters named by dotted path ("layers.0.attention.q.weight") by `PackedWeight`s of their shape,
    dtype and metadata. Meant for abstract modules, inside `nnx.eval_shape`: the old values are dropped.

    Raises ConfigError where a part of a 4-bit weight would not be whole bytes, naming the parameter.
    """
    for path, packing in packings.items():
        *parents, name = path.split(".")
        owner: Any = module
        for step in parents:
            owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
        param = getattr(owner, name)
        assert isinstance(param, nnx.Param), path
        try:
            packed = PackedWeight(param.shape, packing, dtype=param.dtype, metadata=param.get_metadata())
        except ConfigError as e:
            raise ConfigError(e.what, where=path, found=e.found, expected=e.expected, fix=e.fix) from None
        setattr(owner, name, packed)
