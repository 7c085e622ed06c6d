"""A safetensors file written piece by piece: the format's own library wants all its tensors in memory at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.tensors import DTYPES, TensorInfo


def write_file(
    file: Path,
    infos: Sequence[TensorInfo],
    metadata: dict[str, str],
    pieces: Callable[[TensorInfo], Iterable[Shaped[np.ndarray, "..."]]],
) -> None:
    """Writes `infos` and their bytes to `file`, synced.

    Arguments:
        pieces: the elements of a tensor in order, in any number of arrays.
    """
    # widest first, as the library does it: every tensor is aligned then
    ordered = sorted(infos, key=lambda info: -DTYPES[info.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for info in ordered:
        offsets = [at, at + info.nbytes]
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
        at += info.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with open(file, "wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for info in ordered:
            for piece in pieces(info):
                # numpy hands over no buffer of a type that is not its own, such as bfloat16
                f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
