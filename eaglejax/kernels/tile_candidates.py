"""What may be chosen for a kernel and shape: cuts that divide it and fit the memory of a block, for every number of rows that it serves."""

from __future__ import annotations

import functools

from eaglejax.kernels import project
from eaglejax.kernels.experts_gpu_shape import (
    MOST_RANGES,
    MOST_ROUTED,
    SHARED,
    TILE,
    down_ring,
    gateup_ring,
    padded_rows,
    route_columns,
)
from eaglejax.kernels.tiles import CHOICES, SHAPES, Choice, Key
from eaglejax.kernels.tree_attention_shape import most_rows, rows_of, splits_of, stages_of, tile_of

MOST_COLUMNS = 64  # of the products of experts and projections: their most rows
STEPS = (256, 128, 64)
DOWN_STEPS = (256, 192, 128, 64)
BUFFERS = (2, 3, 4, 6)
ENOUGH_BUFFERS = 8  # as many as the rule takes, which fit


@functools.cache
def candidates(key: Key) -> tuple[Choice, ...]:
    """All that is legal. The rule may say something else for some number of rows, and stands beside them."""
    return tuple({"attention": _attention, "route": _route, "project": _project}.get(key.kernel, _experts)(key))


def rule(key: Key, rows: int = 1) -> Choice:
    """What the kernel's own rule says for so many rows (of a slot)."""
    shape = key.named()
    match key.kernel:
        case "attention":
            most = most_rows(shape["value_width"])
            blocks, _ = rows_of(rows * shape["heads"] // shape["kv_heads"], most)
            splits = splits_of(shape["slots"] * shape["kv_heads"] * blocks)
            return tile_of(shape["width"], shape["value_width"]), splits, most
        case "gateup":
            ring = gateup_ring(padded_rows(rows), shape["d"])
        case "down":
            ring = down_ring(padded_rows(rows), shape["d"], shape["f"])
        case "route":
            wide = route_columns(shape["d"])
            return TILE, wide // TILE, shape["d"] // wide
        case _:
            ring = project.cut_of(rows, shape["d"], key.shape[1:])
    return ring.step, ring.stages, ring.parts


def whole(kernel: str, shape: tuple[int, ...]) -> bool:
    """Whether these may be the numbers of a key: none is missing, and each is possible."""
    least = 2 if kernel == "project" else len(SHAPES[kernel])
    latent = SHAPES[kernel].index("latent") if "latent" in SHAPES[kernel] else None
    return least <= len(shape) <= len(SHAPES[kernel]) and all(
        value in (0, 1) if index == latent else value > 0 for index, value in enumerate(shape)
    )


def _attention(key: Key) -> list[Choice]:
    slots, heads, kv_heads, width, value_width, latent, cached = key.shape
    most = most_rows(value_width)
    if width % 64 or value_width % 64 or most == 0 or heads % kv_heads:
        return []
    fill, found = splits_of(slots * kv_heads), []
    for tile in (64, 128):
        if stages_of(most, width, value_width, bool(latent), tile) < 2:
            continue
        tiles = -(-cached // tile) + 1  # a tile of step rows
        splits = {max(1, min(part, tiles)) for part in (fill // 4, fill // 2, fill * 3 // 4, fill, 2 * fill)}
        # half of the rows of a block: fewer registers, and the cache is read once more from the second-level cache
        found += [(tile, each, rows) for each in sorted(splits) for rows in sorted({most, max(8, most // 16 * 8)})]
    return found


def _experts(key: Key) -> list[Choice]:
    shape = key.named()
    d, f = shape["d"], shape["f"]
    if d % TILE or f % TILE or d < 2 * TILE:
        return []
    if key.kernel == "gateup":
        size = lambda step, columns: (2 * TILE + columns) * step * 2
        space = lambda columns: SHARED - TILE * columns * 2
        return [
            (step, stages, 1)
            for step in STEPS
            if d % step == 0 and 2 * size(step, MOST_COLUMNS) <= space(MOST_COLUMNS)
            for stages in BUFFERS
            # more would be none for any number of rows
            if stages == 2 or stages <= min(space(8) // size(step, 8), d // step + 1)
        ]
    fits = lambda step: 2 * (TILE + MOST_COLUMNS) * step * 2 + TILE * MOST_COLUMNS * 4 <= SHARED
    by_rule = rule(key)[CHOICES["down"].index("parts")]
    return [
        (step, ENOUGH_BUFFERS, parts)
        for step in DOWN_STEPS
        if f % step == 0 and fits(step)
        for parts in sorted({1, 2, 4, 8, by_rule})
        if step * parts <= f
    ]


def _route(key: Key) -> list[Choice]:
    d = key.named()["d"]
    tiles = d // TILE
    fits = lambda wide: wide * (TILE * 4 + padded_rows(MOST_ROUTED) * 2) <= SHARED
    return [
        (TILE, tiles // parts, parts)
        for parts in range(1, MOST_RANGES + 1)
        if not d % TILE and tiles % parts == 0 and fits(d // parts)
    ]


def _project(key: Key) -> list[Choice]:
    d, *outs = key.shape
    if d % TILE or any(out % TILE for out in outs):
        return []
    tiles = sum(outs) // TILE
    found = []
    for parts in project.PARTS:
        if parts > 1 and tiles * parts > project.CLUSTERED:
            continue
        for step in STEPS:
            rest = project.result_bytes(MOST_COLUMNS, parts)
            fits = 2 * (TILE + MOST_COLUMNS) * step * 2 + rest <= SHARED
            if d % step == 0 and fits and (parts == 1 or d >= 2 * step * parts):
                found += [(step, stages, parts) for stages in (3, ENOUGH_BUFFERS)]
    return found
