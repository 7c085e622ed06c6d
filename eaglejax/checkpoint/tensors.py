"""What every checkpoint reader offers, whatever the file: a table of tensors, each read on demand as a numpy array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from eaglejax.errors import CheckpointError

# By the names that safetensors gives. Numpy itself has no bfloat16 and no 8-bit floats; ml_dtypes, part of jax, has.
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, known from the file's header alone.

    `dtype` is a key of `DTYPES`: what `CheckpointReader.read` returns. `offset` counts bytes from the start of `file`.
    `stored` is the form on disk where that differs (GGUF: "Q4_1" is read as "F32"), else the same as `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    stored: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array that `CheckpointReader.read` returns."""
        return self.size * DTYPES[self.dtype].itemsize


class CheckpointReader:
    """The tensors of a checkpoint whose files were found whole; nothing is read from them until `read` is called.

    Attributes:
        path: folder or file that was opened.
        tensors: every tensor by its Hugging Face name.
        metadata: the files' own notes.
        hf_config: the model's config in the keys of a config.json, where the file itself carries it (GGUF), else None.
        gguf_tokenizer: the tokenizer of a GGUF file, else None.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None):
        self.path = path
        self.tensors: dict[str, TensorInfo] = dict(tensors)
        self.metadata: dict[str, str] = dict(metadata or {})
        self.hf_config: dict | None = None
        self.gguf_tokenizer: dict | None = None

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The whole tensor, a fresh array in the dtype of its `TensorInfo`; only its own bytes are read."""
        info = self.info(name)
        data = read_bytes(info.file, info.offset, info.nbytes)
        return data.view(DTYPES[info.dtype]).reshape(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        """Rows `start` to `stop` (not included) of the first axis; only their bytes are read from the disk."""
        info = self.info(name)
        self._check_rows(info, start, stop)
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        data = read_bytes(info.file, info.offset + start * row, (stop - start) * row)
        return data.view(DTYPES[info.dtype]).reshape(stop - start, *info.shape[1:])

    def read_block(
        self,
        name: str,
        index: Sequence[slice],
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> Shaped[np.ndarray, "..."]:
        """The part of a tensor that `index` cuts out: one slice per axis, step 1, within bounds; a fresh array.

        Arguments:
            shape, dtype: the tensor's bytes seen as an array of this shape and dtype (a key of `DTYPES`) instead of
                its own.
        """
        seen = self.read(name).reshape(-1).view(DTYPES[dtype or self.info(name).dtype])
        return np.array(seen.reshape(self.info(name).shape if shape is None else tuple(shape))[tuple(index)])

    def info(self, name: str) -> TensorInfo:
        """The table's entry of `name`; a CheckpointError where there is none."""
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing", where=self.path)
        return self.tensors[name]

    def _check_rows(self, info: TensorInfo, start: int, stop: int) -> None:
        rows = info.shape[0] if info.shape else 0
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"{info.file}: rows {start}:{stop} of {info.name!r}, which has {rows}")


def read_bytes(file: Path, offset: int, count: int) -> UInt8[np.ndarray, " {count}"]:
    """`count` bytes of `file` from `offset` on, as a fresh array: aligned, and safe when the file changes later."""
    data = np.empty(count, np.uint8)
    view, done = memoryview(data.data), 0
    try:
        with open(file, "rb", buffering=0) as f:
            f.seek(offset)
            # one call reads at most 2 GiB on Linux
            while done < count and (got := f.readinto(view[done:])):
                done += got
    except OSError as e:
        raise CheckpointError(f"cannot be read: {e.strerror or e}", where=file) from e
    if done < count:
        raise CheckpointError(
            "became shorter while it was being read",
            where=file,
            found=f"{offset + done} bytes",
            expected=f"at least {offset + count}",
        )
    return data
