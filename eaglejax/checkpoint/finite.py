"""Refuses weights that hold NaN or infinity, which would load silently and turn every answer into noise."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.tensors import TensorInfo
from eaglejax.errors import CheckpointError

# float dtype -> the signed and unsigned integers of its width, and the bits of +infinity
_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000),
    np.dtype(np.float64): (np.int64, np.uint64, 0x7FF0000000000000),
}


def refuse_nonfinite(values: Shaped[np.ndarray, "..."], info: TensorInfo) -> None:
    """Raises CheckpointError where `values`, read from the tensor `info`, are not all finite, and counts them.

    Other dtypes than float16, bfloat16, float32 and float64 pass unlooked at. Costs two reductions at the speed of
    memory and no copy.
    """
    if finite(values):
        return
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = values.astype(np.float64)
    nan, infinite = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    counts = [f"{count} {what}" for count, what in ((nan, "NaN"), (infinite, "infinite")) if count]
    raise CheckpointError(
        "weights that are not finite numbers",
        where=f"{info.file}: {info.name}",
        found=f"{' and '.join(counts)} of {values.size} values",
        expected="finite numbers only",
        fix="download the file again; if it was published so, it was spoilt by an overflow in training or conversion"
        " (float16, mostly): use another release",
    )


def finite(values: Shaped[np.ndarray, "..."]) -> bool:
    """Whether no value is NaN or infinite; True for dtypes without a check."""
    if values.dtype not in _BITS or values.size == 0:
        return True
    signed, unsigned, infinity = _BITS[values.dtype]
    sign = 1 << (8 * values.itemsize - 1)
    # as integers, positive ones from infinity up are the largest signed numbers, negative ones the largest unsigned
    return bool(values.view(signed).max() < infinity and values.view(unsigned).max() < infinity + sign)
