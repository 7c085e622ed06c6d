"""What every checkpoint reader offers, whatever the file: a table of tensors, each read on demand as a numpy array."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.byte_runs import block_runs, full_index, read_bytes, read_runs
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
        hf_config: the model's config in the keys of a config.json, where the reader itself carries it (GGUF, a difference
            on a base), else None.
        gguf_tokenizer: the tokenizer of a GGUF file, else None.
        text_folder: where the tokenizer's files lie if not beside the weights, else None.
        notes: lines for the load report.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None):
        self.path = path
        self.tensors: dict[str, TensorInfo] = dict(tensors)
        self.metadata: dict[str, str] = dict(metadata or {})
        self.hf_config: dict | None = None
        self.gguf_tokenizer: dict | None = None
        self.text_folder: Path | None = None
        self.notes: tuple[str, ...] = ()
        self._bytes_read = 0
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._bytes_read

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The whole tensor, a fresh array in the dtype of its `TensorInfo`; only its own bytes are read."""
        info = self.info(name)
        data = read_bytes(info.file, info.offset, info.nbytes)
        self.count_bytes(info.nbytes)
        return data.view(DTYPES[info.dtype]).reshape(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        """Rows `start` to `stop` (not included) of the first axis; only their bytes are read from the disk."""
        info = self.info(name)
        self._check_rows(info, start, stop)
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        data = read_bytes(info.file, info.offset + start * row, (stop - start) * row)
        self.count_bytes(data.nbytes)
        return data.view(DTYPES[info.dtype]).reshape(stop - start, *info.shape[1:])

    def read_block(
        self,
        name: str,
        index: Sequence[slice],
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> Shaped[np.ndarray, "..."]:
        """The part of a tensor that `index` cuts out, one slice with start and stop per axis; a fresh array.

        Only the bytes of that part are read (runs that lie closer than 5 % of what is read are read in one). A kind
        of file that cannot do so (torch .bin, GGUF) reads the whole tensor and cuts it.

        Arguments:
            shape, dtype: the tensor's bytes seen as an array of this shape and dtype (a key of `DTYPES`) instead of
                its own, e.g. [h c, d] as [h, c, d], or int32 as four bytes each.
        """
        info = seen_as(self.info(name), shape, dtype)
        index = full_index(index, info.shape)
        offsets, run = block_runs(info.shape, DTYPES[info.dtype].itemsize, index)
        data = read_runs(info.file, offsets + info.offset, run, self.count_bytes)
        return data.view(DTYPES[info.dtype]).reshape([part.stop - part.start for part in index])

    def count_bytes(self, count: int) -> None:
        """Adds to `bytes_read`; several threads may read at once."""
        with self._lock:
            self._bytes_read += count

    def info(self, name: str) -> TensorInfo:
        """The table's entry of `name`; a CheckpointError where there is none."""
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing", where=self.path)
        return self.tensors[name]

    def _check_rows(self, info: TensorInfo, start: int, stop: int) -> None:
        rows = info.shape[0] if info.shape else 0
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"{info.file}: rows {start}:{stop} of {info.name!r}, which has {rows}")


def seen_as(info: TensorInfo, shape: Sequence[int] | None, dtype: str | None) -> TensorInfo:
    """The entry with another shape or dtype of as many bytes; its own where both are None."""
    seen = replace(info, shape=info.shape if shape is None else tuple(shape), dtype=dtype or info.dtype)
    assert seen.nbytes == info.nbytes, (info, shape, dtype)
    return seen


def cut_block(
    values: Shaped[np.ndarray, "..."], index: Sequence[slice], shape: Sequence[int] | None, dtype: str | None
) -> Shaped[np.ndarray, "..."]:
    """What `CheckpointReader.read_block` returns, of a tensor that was read whole."""
    seen = np.ascontiguousarray(values).reshape(-1).view(values.dtype if dtype is None else DTYPES[dtype])
    seen = seen.reshape(values.shape if shape is None else tuple(shape))
    return np.array(seen[full_index(index, seen.shape)])
