"""Blocks of a leaf from the tensors it is made of: only the bytes of the block are read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int, Shaped

from eaglejax.checkpoint.finite import refuse_nonfinite
from eaglejax.checkpoint.quantised_parts import axis_groups
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader
from eaglejax.checkpoint.weight_plan import Part, Recipe, Scales, plain

Index = tuple[slice, ...]
# bytes that are read and converted at a time, beside the block itself
CHUNK = 64 << 20


def read_leaf_block(
    recipe: Recipe,
    reader: CheckpointReader,
    index: Index,
    dtype: np.dtype,
    step: tuple[int, int] = (1, 1),
) -> Shaped[np.ndarray, "..."]:
    """The block `index` (start and stop per axis) of a leaf, in its dtype.

    Arguments:
        step: for the scales of a quantised weight, the rows and columns of the weight under each.
    """
    shape = [part.stop - part.start for part in index]
    block = aligned(shape, dtype)
    for part, target, rest in _parts_within(recipe, block, index):
        read = _read_scales if part.scales is not None else _read_plain
        read(part, reader, rest, target, step)
    return block


def bytes_needed(recipe: Recipe, reader: CheckpointReader, index: Index, step: tuple[int, int] = (1, 1)) -> int:
    """Bytes in the files that the block is made of; each scale is counted once, however often it is repeated."""
    total = 0
    nothing = np.empty([part.stop - part.start for part in index], np.dtype([]))
    for part, _, rest in _parts_within(recipe, nothing, index):
        if part.scales is None:
            dtype = DTYPES[part.dtype or reader.info(part.name).dtype]
            total += math.prod(p.stop - p.start for p in rest) * dtype.itemsize
        else:
            cells = _distinct(part.scales, tuple((p.start, p.stop) for p in rest), step)
            total += cells * DTYPES[reader.info(part.name).dtype].itemsize
    return total


def aligned(shape: Sequence[int], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An unset array that begins at a multiple of 64 bytes: the CPU's devices take such an array as it is, and copy
    others."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _parts_within(recipe: Recipe, block: np.ndarray, index: Index) -> Iterator[tuple[Part, np.ndarray, Index]]:
    """Each part of which the block holds anything: its place in the block, and the index within the part."""
    for part in recipe:
        lead = list(zip(part.place, index, strict=False))
        if all(cut.start <= at < cut.stop for at, cut in lead):
            yield part, block[tuple(at - cut.start for at, cut in lead)], index[len(part.place) :]


def _read_plain(part: Part, reader: CheckpointReader, index: Index, target: np.ndarray, step: tuple[int, int]) -> None:
    info = reader.info(part.name)
    dtype = DTYPES[part.dtype or info.dtype]
    size = math.prod(target.shape) * dtype.itemsize
    if size > CHUNK and (axis := next((a for a, n in enumerate(target.shape) if n > 1), None)) is not None:
        rows = max(1, target.shape[axis] * CHUNK // size)
        for at in range(0, target.shape[axis], rows):
            end = min(at + rows, target.shape[axis])
            cut = slice(index[axis].start + at, index[axis].start + end)
            inner = (*index[:axis], cut, *index[axis + 1 :])
            _read_plain(part, reader, inner, target[(*(slice(None),) * axis, slice(at, end))], step)
        return
    view = part.view or plain(info.shape)
    shape = None if view.shape == info.shape else view.shape
    values = reader.read_block(part.name, view.source(index), shape=shape, dtype=part.dtype)
    refuse_nonfinite(values, info)
    target[...] = values.transpose(view.order)


def _read_scales(part: Part, reader: CheckpointReader, index: Index, target: np.ndarray, step: tuple[int, int]) -> None:
    scales = part.scales
    assert scales is not None
    cells = _cells(scales, index, step)
    block = tuple(slice(int(rows[0]), int(rows[-1]) + 1) for rows in cells)
    stored = reader.read_block(part.name, block, shape=scales.grid)
    refuse_nonfinite(stored, reader.info(part.name), exponents=True)
    values = stored[np.ix_(*(rows - rows[0] for rows in cells))]
    counts = [0] * len(scales.view.shape)
    for part_of, axis in zip(index, scales.view.order, strict=True):
        counts[axis] = part_of.stop - part_of.start
    target[...] = values.reshape(counts).transpose(scales.view.order)


@lru_cache(maxsize=1024)
def _distinct(scales: Scales, ends: tuple[tuple[int, int], ...], step: tuple[int, int]) -> int:
    """How many stored scales a block has; the experts of a model, by the ten thousand, all have the same."""
    index = tuple(slice(*pair) for pair in ends)
    return math.prod(len(np.unique(rows)) for rows in _cells(scales, index, step))


def _cells(scales: Scales, index: Index, step: tuple[int, int]) -> list[Int[np.ndarray, " n"]]:
    """For each axis of the stored grid the cell of every scale of the block, in ascending order."""
    steps = (*(1 for _ in index[:-2]), *step)
    along: list[np.ndarray] = [np.zeros(1, np.int64)] * len(scales.view.shape)
    for part, size, axis in zip(index, steps, scales.view.order, strict=True):
        along[axis] = np.arange(part.start, part.stop, dtype=np.int64) * size + scales.view.start[axis]
    cells = []
    for group, block in zip(axis_groups(scales.shape, scales.view.shape), scales.blocks, strict=True):
        places = np.zeros(1, np.int64)
        for axis in group:
            places = (places[:, None] * scales.view.shape[axis] + along[axis][None]).reshape(-1)
        cells.append(places // block)
    return cells
