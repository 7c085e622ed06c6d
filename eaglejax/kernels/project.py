"""Several projections of the same rows in one launch, where a kernel serves them; no Pallas in here: it is imported late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Shaped

from eaglejax.kernels.experts_gpu_shape import BLOCKS, ENOUGH, SHARED, Ring, padded_rows
from eaglejax.kernels.select import chosen_kernels, no_pallas
from eaglejax.models.layers import Linear

TILE = 64  # rows of a weight in one tensor core instruction
MOST_ROWS = 64
MOST_WEIGHTS = 4
PARTS = (4, 2, 1)  # blocks of one cluster
CLUSTERED = 128  # cores that whole clusters of four can fill


@dataclass(frozen=True)
class Cut:
    """Blocks multiply `tiles` weight tiles in turn, `step` columns in each of `stages` buffers; `parts` blocks share the sum of a tile."""

    tiles: tuple[int, ...]  # of each weight
    step: int
    steps: int
    stages: int
    parts: int

    @property
    def blocks(self) -> int:
        return min(sum(self.tiles), BLOCKS)


def projections(x: Shaped[Array, "*lead d"], *linears: Linear) -> tuple[Shaped[Array, "..."], ...]:
    """What each of the projections makes of x."""
    if chosen_kernels() == "pallas" and no_pallas() is None and serves(x, linears) is None:
        from eaglejax.kernels.project_gpu import project_gpu

        with jax.named_scope("projections"):
            return project_gpu(x, *(linear.weight[...] for linear in linears))
    return tuple(linear(x) for linear in linears)


def serves(x: Shaped[Array, "*lead d"], linears: Sequence[Linear]) -> str | None:
    """Why the kernel cannot take these projections, or None."""
    if any(linear.bias is not None for linear in linears):
        return "it adds no bias"
    if any(linear.summed.axis is not None for linear in linears):
        return "its products are not summed over devices"
    weights = [linear.weight[...] for linear in linears]
    d = x.shape[-1]
    return serves_shapes(
        x.size // d, d, [weight.size // d for weight in weights], [array.dtype for array in (x, *weights)]
    )


def serves_shapes(rows: int, d: int, outs: Sequence[int], dtypes: Sequence[DTypeLike]) -> str | None:
    """`serves` of rows of d and of weights of `outs` rows.

    Arguments:
        dtypes: of the rows and of the weights.
    """
    if wrong := [name for name in (jnp.dtype(dtype).name for dtype in dtypes) if name != "bfloat16"]:
        return f"it multiplies bfloat16, not {wrong[0]}"
    if not 0 < rows <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows, not {rows}"
    if not 0 < len(outs) <= MOST_WEIGHTS:
        return f"it takes 1 to {MOST_WEIGHTS} weights, not {len(outs)}"
    if wrong := [width for width in (d, *outs) if not width or width % TILE]:
        return f"{wrong[0]} is not made of whole tiles of {TILE}"
    return None


def cut_of(rows: int, d: int, outs: Sequence[int], parts: int | None = None, choice: Ring | None = None) -> Cut:
    """How sums are split, and where, follows from the weights alone: what a row gets may not depend on the rows beside it.

    Arguments:
        parts: instead of the ones chosen here, to compare them.
        choice: step and parts in place of the rule's, and buffers at most.
    """
    tiles, columns = tuple(out // TILE for out in outs), padded_rows(rows)
    if choice is not None:
        size, rest = (TILE + columns) * choice.step * 2, result_bytes(columns, choice.parts)
        steps = d // choice.step
        stages = max(2, min(choice.stages, (SHARED - rest) // size, steps // choice.parts + 1))
        return Cut(tiles, choice.step, steps, stages, choice.parts)
    step = next(step for step in (128, 192, 64) if d % step == 0)
    # a split costs a round trip through the L2, so it is made only where whole cores would stand idle
    fitting = (each for each in PARTS if sum(tiles) * each <= CLUSTERED and d >= 2 * step * each)
    if parts is None or sum(tiles) > BLOCKS:  # blocks with more than one tile have no use for a split
        parts = next(fitting, 1)
    if parts == 1 and columns <= 16 and d % 256 == 0:
        step = 256  # fewer rounds, where a core has many of them and room
    size = (TILE + columns) * step * 2
    rest = result_bytes(columns, parts)
    # clusters of four may not find all cores: two blocks may have to share one
    half = (SHARED // 2 - 1024 - rest) // size
    fit = half if parts > 2 and half >= 4 else (SHARED - rest) // size
    stages = max(2, min(8, fit, (ENOUGH + size) // size, d // step // parts + 1))
    return Cut(tiles, step, d // step, stages, parts)


def result_bytes(columns: int, parts: int) -> int:
    """Shared memory of a tile of the result, and of parts of its sum."""
    return TILE * columns * 4 * (parts + 1 if parts > 1 else 1)
