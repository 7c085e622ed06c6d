"""Which experts the Mosaic kernels serve, and how they cut them; no Pallas in here, so that plans can ask cheaply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

BLOCKS = 132  # cores of an H100 or H200; on a card with fewer the rest wait their turn
TILE = 64  # rows of a weight in one tensor core instruction
PART = 128  # columns of a packed weight that are widened together; a step has two such parts
SHARED = 232448 - 2048  # bytes of shared memory that a block may have, less barriers and alignment
MOST_ROWS, MOST_EXPERTS = 64, 1024
ENOUGH = 128 << 10  # bytes on their way to one core that keep the memory busy
WIDTHS = (256, 192, 128, 64)
MOST_ROUTED, MOST_ROUTER_EXPERTS, MOST_RANGES = 16, 512, 16  # of the router's kernels


@dataclass(frozen=True)
class Ring:
    """`stages` buffers of `step` columns of a weight; `parts` into which the sum over the columns is cut. As a choice of `tiles`: at most
    so many buffers."""

    step: int
    stages: int
    parts: int = 1


class Tables(NamedTuple):
    """Which experts the rows of one pass chose, as the experts kernels read it.

    table: with what weight each row (padded) takes each expert, -inf where it does not; more experts than there are may follow.
    words: bit e % 32 of word e // 32 says whether any row chose expert e.
    ids, weights: those of each row, ascending, where asked for.
    """

    table: Float[Array, "e columns"]
    words: Int[Array, " w"]
    ids: Int[Array, "n k"] | None = None
    weights: Float[Array, "n k"] | None = None


class Parts(NamedTuple):
    """The sum over the experts of each row, in the parts in which the kernels leave it: each is over its own range of every expert's width.

    sums: [parts, rows or more, d], float32; rows beyond those of the pass hold anything.
    """

    sums: Float[Array, "p columns d"]

    def total(self, rows: int) -> Float[Array, "n d"]:
        """Of so many rows, in float32. A chain of additions, not a reduction: its order must be the same in every program."""
        total = self.sums[0]
        for part in self.sums[1:]:
            total = total + part
        return total[:rows]


def summed(out: Float[Array, "n d"] | Parts, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What the experts make of the rows x, in the dtype of x, where it may be in parts still."""
    return out.total(x.shape[0]).astype(x.dtype) if isinstance(out, Parts) else out


def padded_rows(rows: int) -> int:
    """Columns of the tensor cores' product for so many rows."""
    return next(columns for columns in (8, 16, 32, 64) if rows <= columns)


def gateup_ring(columns: int, d: int, choice: Ring | None = None) -> Ring:
    """For tiles of gate and up together, [2 * TILE, step]; `choice` in place of the rule."""
    space = SHARED - TILE * columns * 2
    if choice is None:
        step = next(step for step in (128, 192, 64) if d % step == 0)
        if step == 192 and columns == 64:
            step = 64
        stages = _stages((2 * TILE + columns) * step * 2, space)
    else:
        step, stages = choice.step, min(choice.stages, space // ((2 * TILE + columns) * choice.step * 2))
    # no further ahead than the next task, whose expert is known
    return Ring(step, max(2, min(stages, d // step + 1)))


def down_ring(columns: int, d: int, f: int, choice: Ring | None = None) -> Ring:
    """For tiles [TILE, step]. Step and parts follow from d and f (or `choice`) alone: on them depends the order of a sum."""
    step, parts = _down_parts(d, f) if choice is None else (choice.step, choice.parts)
    # with more blocks than cores two share one
    space = SHARED if d // TILE * parts <= BLOCKS else SHARED // 2 - 1024
    stages = _stages((TILE + columns) * step * 2, space - TILE * columns * 4)
    return Ring(step, stages if choice is None else max(2, min(stages, choice.stages)), parts)


def packed_ring(columns: int, d: int, f: int | None = None, *, size: int) -> Ring:
    """For packed tiles of gate and up together; with f, for those of down [d, f].

    Arguments:
        size: bytes of one row of a step, scales included.
    """
    tile, step = TILE if f else 2 * TILE, 2 * PART
    parts = min(f // step, -(-BLOCKS // (d // TILE))) if f else 1
    # with more blocks than cores two share one, for few rows
    shared = SHARED // 2 - 1024 if f and columns <= 16 and d // TILE * parts > BLOCKS else SHARED
    # two parts that are widened, scales turned round, and the tile that goes out
    space = shared - tile * (2 * PART * 2 + 16) - TILE * columns * (4 if f else 2)
    stages = max(2, min(8, space // (tile * size + columns * step * 2 + 256)))
    return Ring(step, stages if f else min(stages, d // step + 1), parts)


def _stages(size: int, space: int) -> int:
    return max(2, min(8, (min(space, ENOUGH + size)) // size))


def _down_parts(d: int, f: int) -> tuple[int, int]:
    """The cut (columns of a step, parts) that keeps most cores busy, with few parts and long steps."""

    def worth(cut: tuple[int, int]) -> tuple[float, int, int]:
        step, parts = cut
        longest = -(-(f // step) // parts)  # the others wait for it
        even = f // step / parts / longest
        return round(min(d // TILE * parts / BLOCKS, 1.0) * even, 1), -parts, step

    return max(
        ((step, parts) for parts in range(1, 9) for step in WIDTHS if step * parts <= f and not f % step), key=worth
    )


def serves(rows: int, count: int, d: int, f: int, dtypes: Sequence[DTypeLike], activation: str = "silu") -> str | None:
    """Why the kernels cannot take these experts; None where they can. For packed weights see `packed_serves` as well.

    Arguments:
        dtypes: of the rows and of the weights.
    """
    if wrong := [name for name in (jnp.dtype(dtype).name for dtype in dtypes) if name != "bfloat16"]:
        return f"they multiply bfloat16, not {wrong[0]}"
    if not 0 < rows <= MOST_ROWS:
        return f"they take 1 to {MOST_ROWS} rows, not {rows}"
    if count > MOST_EXPERTS:
        return f"they take up to {MOST_EXPERTS} experts, not {count}"
    if d % TILE or f % TILE or d < 2 * TILE:
        return f"{f} of {d} is not made of whole tiles of {TILE}"
    if activation not in ("silu", "gpt_oss"):
        return f"they have no activation {activation!r}"
    return None


def packed_serves(kind: str, grids: Sequence[tuple[int, int]], scale: str, d: int, f: int) -> str | None:
    """Why the kernels for packed weights cannot take these, which `serves` lets through; None where they can.

    Arguments:
        kind, scale: of `Packing`.
        grids: weights under a scale as they are kept (`Packing.grid`), of gate and up and of down.
    """
    match kind:
        case "int4":
            least, asked = 2 * PART, "a bfloat16 scale for 32 weights of a row"
            fits = scale == "bfloat16" and all(grid == (1, 32) for grid in grids)
        case "fp8":
            # copies go from every 16th byte of the scales
            least, asked = 4 * PART, f"a float32 scale for {PART} columns of whole tiles of {TILE} rows"
            fits = scale == "float32" and all(c == PART and r % TILE == 0 for r, c in grids)
        case _:
            return f"they widen int4 and fp8, not {kind}"
    if not fits:
        return f"they want {asked}"
    if d % least or f % least:
        return f"{f} of {d} is not made of whole steps of {least}"
    return None


def scratch_bytes(rows: int, topk: int, count: int, d: int, f: int) -> int:
    """What lies in device memory between the two kernels, and after them."""
    columns, slots = padded_rows(rows), min(count, rows * topk)
    parts = _down_parts(d, f)[1]
    return columns * (slots * f * 2 + parts * d * 4 + count * 4 + d * 2)


def whole_tiles(count: int) -> int:
    """So many rows of a weight, and those that fill its last tile."""
    return -(-count // TILE) * TILE


def word_count(count: int) -> int:
    """Words of bits for so many experts, by eights: the columns of a sum over the experts."""
    return -(-count // 256) * 8


def route_columns(d: int, choice: Ring | None = None) -> int:
    """Columns of the router's weight that one block multiplies; of a `choice` its parts count."""
    if choice is not None:
        return d // choice.parts
    tiles = d // TILE
    return d // next(parts for parts in range(MOST_RANGES, 0, -1) if tiles % parts == 0)


def route_serves(rows: int, count: int, d: int, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot route these rows; None where they can.

    Arguments:
        dtype: of the rows; the router's weight is float32.
    """
    if (name := jnp.dtype(dtype).name) != "bfloat16":
        return f"they route bfloat16, not {name}"
    if not 0 < rows <= MOST_ROUTED:
        return f"they route 1 to {MOST_ROUTED} rows, not {rows}"
    if count % 8 or count > MOST_ROUTER_EXPERTS:
        return f"they route to experts by eights up to {MOST_ROUTER_EXPERTS}, not to {count}"
    if d % TILE:
        return f"{d} is not made of whole tiles of {TILE}"
    if route_columns(d) * (TILE * 4 + padded_rows(rows) * 2) > SHARED:
        return f"{d} has no cut that fits their memory"
    return None
