"""A draft's weights in bfloat16, in files small enough to be carried one by one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

PART = 15 << 20  # bytes of a file at most


def save_parts(folder: Path, weights: Mapping[str, np.ndarray], facts: Mapping[str, np.ndarray]) -> list[Path]:
    """Writes weights-0.npz, weights-1.npz, ... with flat pieces of the weights; `facts` lie in the first.

    Every file is written aside and renamed, so that a stop in the middle leaves whole files.
    """
    flat = np.concatenate([np.asarray(weights[path], np.float32).reshape(-1) for path in sorted(weights)])
    pieces = np.array_split(flat.astype(ml_dtypes.bfloat16).view(np.uint16), max(1, -(-2 * flat.size // PART)))
    shapes = {f"shape:{path}": np.asarray(np.shape(weights[path]), np.int64) for path in sorted(weights)}
    files = []
    for number, piece in enumerate(pieces):
        buffer = io.BytesIO()
        first = {**shapes, **facts, "parts": np.asarray(len(pieces))} if number == 0 else {}
        np.savez(buffer, piece=piece, **first)
        partial = folder / f"weights-{number}.part"
        partial.write_bytes(buffer.getvalue())
        files.append(partial.rename(folder / f"weights-{number}.npz"))
    return files


def load_parts(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights, float32 by parameter path, and the facts stored beside them."""
    with np.load(folder / "weights-0.npz") as first:
        stored = {name: first[name] for name in first.files}
    count, pieces = int(stored.pop("parts")), [stored.pop("piece")]
    for number in range(1, count):
        with np.load(folder / f"weights-{number}.npz") as part:
            pieces.append(part["piece"])
    flat = np.concatenate(pieces).view(ml_dtypes.bfloat16).astype(np.float32)
    weights, start = {}, 0
    for name in sorted(name for name in stored if name.startswith("shape:")):
        shape = tuple(stored.pop(name))
        size = int(np.prod(shape))
        weights[name.removeprefix("shape:")] = flat[start : start + size].reshape(shape)
        start += size
    return weights, stored
