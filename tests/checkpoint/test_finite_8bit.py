"""NaN and infinity in 8-bit floats are refused like those of wider ones."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from eaglejax.checkpoint.finite import refuse_nonfinite
from eaglejax.checkpoint.tensors import TensorInfo
from eaglejax.errors import CheckpointError

CASES = [
    ("F8_E4M3", ml_dtypes.float8_e4m3fn, (0x7F, 0xFF), (0x7E, 0xFE, 0x00, 0x80)),
    ("F8_E5M2", ml_dtypes.float8_e5m2, (0x7C, 0xFC, 0x7D, 0xFF), (0x7B, 0xFB, 0x00)),
    ("F8_E8M0", ml_dtypes.float8_e8m0fnu, (0xFF,), (0xFE, 0x00, 0x7F)),
]


@pytest.mark.parametrize(("name", "dtype", "bad", "good"), CASES)
def test_every_pattern(name, dtype, bad, good):
    info = TensorInfo("w", (4, 8), name, Path("model.safetensors"), 0, name)
    for byte in (*good, *bad):
        values = np.zeros((4, 8), np.uint8)
        values[2, 3] = byte
        if byte in good:
            refuse_nonfinite(values.view(dtype), info)
            continue
        with pytest.raises(
            CheckpointError, match=r"model.safetensors: w: weights that are not finite.* 1 (NaN|infinite) of 32"
        ):
            refuse_nonfinite(values.view(dtype), info)


def test_exponents_kept_as_bytes():
    info = TensorInfo("s", (4,), "U8", Path("model.safetensors"), 0, "U8")
    scales = np.asarray([0, 127, 254, 255], np.uint8)
    refuse_nonfinite(scales, info)
    with pytest.raises(CheckpointError, match="1 NaN of 4"):
        refuse_nonfinite(scales, info, exponents=True)
