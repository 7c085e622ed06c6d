"""How the Pallas form of tree attention cuts a problem; no Pallas in here, so that plans can ask cheaply."""

from __future__ import annotations

from typing import NamedTuple

from eaglejax.kernels import tiles

BLOCKS = 132  # multiprocessors of an H100 or H200; a block takes most of one's shared memory
SHARED_BYTES = 232_448
SPARE_BYTES = 6_144  # for barriers and for reductions across warps
BLOCK_ROWS = 64  # most query rows that a block takes: its sums stay in registers
MOST_ROWS = 256  # of a key/value head: each 64 more read the cache once more, from the second-level cache at best
MOST_STAGES = 4
PART_BYTES = 4  # of one number of what a range leaves


class Ranges(NamedTuple):
    """Keys of a tile; ranges that the tiles are split into, at most; query rows that share a block, at most."""

    tile: int
    splits: int
    block_rows: int


def ranges(
    slots: int, t: int, heads: int, kv_heads: int, width: int, value_width: int, latent: bool, cached: int
) -> Ranges:
    """For t rows of each slot over `cached` rows: what is stored for this shape, else by rule.

    A stored choice is the same for all t: on tile and splits depends the order of a row's sums.
    """
    key = tiles.Key("attention", (slots, heads, kv_heads, width, value_width, int(latent), tiles.power_of_two(cached)))
    if (choice := tiles.chosen(key)) is not None:
        return Ranges(*choice)
    most = most_rows(value_width)
    blocks, _ = rows_of(t * heads // kv_heads, most)
    return Ranges(tile_of(width, value_width), splits_of(slots * kv_heads * blocks), most)


def left_bytes(
    slots: int, t: int, heads: int, kv_heads: int, width: int, value_width: int, latent: bool, cached: int
) -> int | None:
    """Bytes of what the ranges leave for the merge, t rows a slot over `cached` rows; None for what the kernel does not serve."""
    count = t * heads // kv_heads
    if width % 64 or value_width % 64 or count > MOST_ROWS or most_rows(value_width) == 0:
        return None
    cut = ranges(slots, t, heads, kv_heads, width, value_width, latent, cached)
    blocks, padded = rows_of(count, cut.block_rows)
    splits = min(cut.splits, -(-cached // cut.tile) - (-t // cut.tile))
    values = -(-value_width // 128) * 128
    return slots * kv_heads * blocks * splits * padded * (values + 1) * PART_BYTES


def splits_of(blocks: int) -> int:
    """Ranges of keys for so many blocks of query rows, so that all together fill the card."""
    return max(BLOCKS // blocks, 1)


def most_rows(value_width: int) -> int:
    """Query rows of a block whose sums, and what is added to them, fit into the registers of its 128 threads."""
    return min(BLOCK_ROWS, 64 * 256 // value_width if value_width > 256 else 64 * 128 // value_width) // 8 * 8


def rows_of(count: int, most: int) -> tuple[int, int]:
    """Blocks of query rows, and the rows of each with padding."""
    blocks = -(-count // most)
    return blocks, -(-count // (8 * blocks)) * 8


def tile_of(width: int, value_width: int) -> int:
    """Keys of a tile, by rule."""
    return 128 if max(width, value_width) <= 128 else 64


def stages_of(rows: int, width: int, value_width: int, latent: bool, tile: int) -> int:
    """Tiles that fit into shared memory."""
    held = 2 * rows * (width + tile) + SPARE_BYTES
    return min((SHARED_BYTES - held) // (2 * tile * (width + (0 if latent else value_width))), MOST_STAGES)
