"""pytorch_model.bin without torch: tensors only, none of the code that a pickle could otherwise run.

Since torch 1.6 such a file is a zip: data.pkl says which tensors there are, data/KEY holds the bytes of one storage.
The unpickler below knows the few names that a state dict needs and refuses all others.
"""

from __future__ import annotations

import collections
import math
import pickle
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.byte_runs import read_bytes
from eaglejax.checkpoint.pointer import FETCH_AGAIN, file_size
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader, TensorInfo, cut_block
from eaglejax.errors import CheckpointError

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
CONVERT = (
    'convert it where torch is installed: python -c "import sys, torch; from safetensors.torch import save_file; '
    "state = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
    "save_file({k: v.contiguous().clone() for k, v in state.items()}, 'model.safetensors')\" pytorch_model.bin"
)
# the pickle of a state dict holds names and sizes only: 64 MiB are several 100,000 tensors
MAX_PICKLE = 1 << 26


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild(storage: tuple[str, str], offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    dtype, key = storage
    return _Tensor(dtype, key, offset, tuple(size), tuple(stride))


class _Unpickler(pickle.Unpickler):
    """Rebuilds the description of every tensor and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of a plain state dict")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        _, dtype, key, _, _ = pid
        return dtype, key


class _TorchReader(CheckpointReader):
    """Tensors whose strides are not those of a plain array are read through their storage."""

    strides: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        if name not in self.strides:
            return super().read(name)
        info, strides = self.info(name), self.strides[name]
        itemsize = DTYPES[info.dtype].itemsize
        raw = read_bytes(info.file, info.offset, _extent(info.shape, strides) * itemsize)
        self.count_bytes(raw.nbytes)
        data = raw.view(DTYPES[info.dtype])
        return np.lib.stride_tricks.as_strided(data, info.shape, [s * itemsize for s in strides]).copy()

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        if name not in self.strides:
            return super().read_rows(name, start, stop)
        self._check_rows(self.info(name), start, stop)
        return self.read(name)[start:stop]

    def read_block(
        self, name: str, index: Sequence[slice], *, shape: Sequence[int] | None = None, dtype: str | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """As for any reader; a tensor whose strides are not those of a plain array is read whole and cut."""
        if name not in self.strides:
            return super().read_block(name, index, shape=shape, dtype=dtype)
        return cut_block(self.read(name), index, shape, dtype)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one (included) that a strided view touches."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _plain(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(n == 1 or s == math.prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, strides, strict=True)))


def open_torch(path: Path, files: Iterable[Path]) -> CheckpointReader:
    """The tensors of one or more .bin files; a CheckpointError where one is no plain state dict in zip form."""
    tensors: dict[str, TensorInfo] = {}
    strides: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, info, stride in _read_table(file):
            if name in tensors:
                where = f"{tensors[name].file.name} and {file.name}"
                raise CheckpointError(f"tensor {name!r} is in two files", where=path, found=where)
            tensors[name] = info
            if not _plain(info.shape, stride):
                strides[name] = stride
    reader = _TorchReader(path, tensors)
    reader.strides = strides
    return reader


def _read_table(file: Path) -> list[tuple[str, TensorInfo, tuple[int, ...]]]:
    file_size(file)
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            "is incomplete, or in torch's format from before version 1.6",
            where=file,
            fix=f"{FETCH_AGAIN}, or {CONVERT}",
        )
    # everything a hostile or damaged pickle can raise is a refusal
    try:
        with zipfile.ZipFile(file) as archive, open(file, "rb") as raw:
            prefix = next(n for n in archive.namelist() if n.endswith("data.pkl")).removesuffix("data.pkl")
            if prefix + "byteorder" in archive.namelist() and archive.read(prefix + "byteorder") != b"little":
                raise ValueError("its numbers are not little-endian")
            if archive.getinfo(prefix + "data.pkl").file_size > MAX_PICKLE:
                raise ValueError("its data.pkl is too large for a state dict")
            with archive.open(prefix + "data.pkl") as f:
                state = _Unpickler(f).load()
            if not isinstance(state, dict) or not all(isinstance(t, _Tensor) for t in state.values()):
                raise ValueError("it is no flat state dict of tensors")
            return [(str(n), *_locate(file, archive, raw, prefix, str(n), t)) for n, t in state.items()]
    except Exception as e:
        raise CheckpointError(f"cannot be read without torch: {e}", where=file, fix=CONVERT) from e


def _locate(file: Path, archive: zipfile.ZipFile, raw: IO[bytes], prefix: str, name: str, t: _Tensor):
    """Where the bytes of a tensor lie in the file, its storage checked to hold them all."""
    entry = archive.getinfo(f"{prefix}data/{t.key}")
    itemsize = DTYPES[t.dtype].itemsize
    if min((t.offset, *t.shape, *t.strides), default=0) < 0 or len(t.shape) != len(t.strides):
        raise ValueError(f"shape, strides or offset of {name!r} are impossible")
    if (
        entry.compress_type != zipfile.ZIP_STORED
        or entry.file_size < (t.offset + _extent(t.shape, t.strides)) * itemsize
    ):
        raise ValueError(f"the storage of {name!r} is compressed or too short")
    # the local header's own name and extra field (torch pads there) come before the data
    raw.seek(entry.header_offset + 26)
    lengths = raw.read(4)
    start = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return TensorInfo(name, t.shape, t.dtype, file, start + t.offset * itemsize, stored=t.dtype), t.strides
