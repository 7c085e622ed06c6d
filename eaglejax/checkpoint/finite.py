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


# 8-bit floats: the bits that are looked at, and their values that are NaN or infinite
_BYTES = {
    np.dtype(ml_dtypes.float8_e4m3fn): (0x7F, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): (0x7F, 0x7C),
    np.dtype(ml_dtypes.float8_e8m0fnu): (0xFF, 0xFF),
}


def refuse_nonfinite(values: Shaped[np.ndarray, "..."], info: TensorInfo, *, exponents: bool = False) -> None:
    """Raises CheckpointError where `values`, read from the tensor `info`, are not all finite, and counts them.

    Integers pass unlooked at, but for `exponents`: bytes that are e8m0 scales (mxfp4). Costs two reductions at the speed of
    memory and no copy.
    """
    if exponents and values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e8m0fnu)
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
    if values.dtype in _BYTES and values.size:
        mask, least = _BYTES[values.dtype]
        return bool((values.view(np.uint8) & np.uint8(mask)).max() < least)
    if values.dtype not in _BITS or values.size == 0:
        return True
    signed, unsigned, infinity = _BITS[values.dtype]
    sign = 1 << (8 * values.itemsize - 1)
    # as integers, positive ones from infinity up are the largest signed numbers, negative ones the largest unsigned
    return bool(values.view(signed).max() < infinity and values.view(unsigned).max() < infinity + sign)
