"""Which bytes of a file make up a block of a tensor, and reading them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from eaglejax.errors import CheckpointError

# reading a little more in one go beats many small reads; more than this is not allowed for it
SLACK = 1.05


def full_index(index: Sequence[slice], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """One slice per axis with start and stop within the axis; an IndexError for anything else."""
    if len(index) != len(shape):
        raise IndexError(f"{len(index)} slices for an array of shape {list(shape)}")
    full = []
    for part, size in zip(index, shape, strict=True):
        start, stop = 0 if part.start is None else part.start, size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(f"slice {part} of an axis of {size}")
        full.append(slice(start, stop))
    return tuple(full)


def block_runs(shape: tuple[int, ...], itemsize: int, index: tuple[slice, ...]) -> tuple[Int64[np.ndarray, " n"], int]:
    """Where the runs of bytes of a block begin within the tensor, ascending, and the length that all have."""
    run, offsets, stride = itemsize, np.zeros(1, np.int64), itemsize
    contiguous = True
    for size, part in zip(reversed(shape), reversed(index), strict=True):
        count = part.stop - part.start
        if contiguous:
            run, offsets = run * count, offsets + part.start * stride
            # beyond an axis that is cut, steps of outer axes leave gaps
            contiguous = count == size
        else:
            steps = (part.start + np.arange(count, dtype=np.int64)) * stride
            offsets = (steps[:, None] + offsets[None]).reshape(-1)
        stride *= size
    return (offsets, run) if run else (offsets[:0], 0)


def read_runs(
    file: Path, offsets: Int64[np.ndarray, " n"], run: int, count_bytes: Callable[[int], None]
) -> UInt8[np.ndarray, " bytes"]:
    """The bytes of runs of one length one after the other; `count_bytes` hears how many were read from the file."""
    if len(offsets) == 0:
        return np.empty(0, np.uint8)
    span = int(offsets[-1] - offsets[0]) + run
    if len(offsets) == 1 or span <= SLACK * run * len(offsets):
        data = read_bytes(file, int(offsets[0]), span)
        count_bytes(span)
        if span == run * len(offsets):
            return data
        return np.concatenate([data[at : at + run] for at in offsets - offsets[0]])
    data = np.empty(run * len(offsets), np.uint8)
    view = memoryview(data.data)
    try:
        with open(file, "rb", buffering=0) as f:
            for place, offset in enumerate(offsets.tolist()):
                f.seek(offset)
                _read_into(f, view[place * run : (place + 1) * run], file, offset)
    except OSError as e:
        raise CheckpointError(f"cannot be read: {e.strerror or e}", where=file) from e
    count_bytes(data.nbytes)
    return data


def read_bytes(file: Path, offset: int, count: int) -> UInt8[np.ndarray, " {count}"]:
    """`count` bytes of `file` from `offset` on, as a fresh array: aligned, and safe when the file changes later."""
    data = np.empty(count, np.uint8)
    try:
        with open(file, "rb", buffering=0) as f:
            f.seek(offset)
            _read_into(f, memoryview(data.data), file, offset)
    except OSError as e:
        raise CheckpointError(f"cannot be read: {e.strerror or e}", where=file) from e
    return data


def _read_into(f, view: memoryview, file: Path, offset: int) -> None:
    """Fills `view` from the place of `f`, which is byte `offset` of `file`."""
    done, count = 0, len(view)
    # one call reads at most 2 GiB on Linux
    while done < count and (got := f.readinto(view[done:])):
        done += got
    if done < count:
        raise CheckpointError(
            "became shorter while it was being read",
            where=file,
            found=f"{offset + done} bytes",
            expected=f"at least {offset + count}",
        )


def block_bytes(index: Sequence[slice], itemsize: int) -> int:
    """Bytes of a block."""
    return math.prod(part.stop - part.start for part in index) * itemsize
