"""The GGUF container: metadata, table of tensors, and the tensors' values widened to plain floats.

A reader of our own, since the `gguf` package takes 3 s for a table of 50,000 tokens, checks nothing against the size of
the file, and brings an HTTP client along. Quantised forms other than the three simple ones here are widened by that
package (extra `demo`).
Layout (little-endian): magic, version, counts, key-values, tensor infos, padding, tensors, each at an aligned offset.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from eaglejax.checkpoint.pointer import FETCH_AGAIN, file_size
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader
from eaglejax.errors import CheckpointError

# value types of the metadata by number; 8 is text, 9 an array
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class Form:
    """How ggml stores a tensor: `block` elements in `nbytes` bytes. `dtype` is what they are read as."""

    name: str
    block: int
    nbytes: int
    dtype: str = "F32"


# ggml's numbers
FORMS = {
    0: Form("F32", 1, 4),
    1: Form("F16", 1, 2, "F16"),
    2: Form("Q4_0", 32, 18),
    3: Form("Q4_1", 32, 20),
    6: Form("Q5_0", 32, 22),
    7: Form("Q5_1", 32, 24),
    8: Form("Q8_0", 32, 34),
    10: Form("Q2_K", 256, 84),
    11: Form("Q3_K", 256, 110),
    12: Form("Q4_K", 256, 144),
    13: Form("Q5_K", 256, 176),
    14: Form("Q6_K", 256, 210),
    16: Form("IQ2_XXS", 256, 66),
    17: Form("IQ2_XS", 256, 74),
    18: Form("IQ3_XXS", 256, 98),
    19: Form("IQ1_S", 256, 50),
    20: Form("IQ4_NL", 32, 18),
    21: Form("IQ3_S", 256, 110),
    22: Form("IQ2_S", 256, 82),
    23: Form("IQ4_XS", 256, 136),
    29: Form("IQ1_M", 256, 56),
    30: Form("BF16", 1, 2, "BF16"),
    34: Form("TQ1_0", 256, 54),
    35: Form("TQ2_0", 256, 66),
    39: Form("MXFP4", 32, 17),
}
FORM_NUMBERS = {form.name: number for number, form in FORMS.items()}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the table: `shape` in numpy's order ([out, in]), `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    form: Form
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.form.block * self.form.nbytes


def open_gguf(file: Path) -> CheckpointReader:
    """Opens a .gguf file of the llama architecture as a checkpoint with Hugging Face names."""
    from eaglejax.checkpoint.gguf_llama import LlamaGGUFReader

    return LlamaGGUFReader(file, *read_table(file))


class _Cursor:
    """Reads values one after the other and refuses to pass the end of the file."""

    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.size, self.position = file, data, len(data), 0

    def advance(self, count: int) -> int:
        """Moves on by `count` bytes; gives the place before."""
        start = self.position
        if start + count > self.size:
            raise CheckpointError(
                f"incomplete: at least {start + count} bytes expected, {self.size} found (its header is cut)",
                where=self.file,
                fix=FETCH_AGAIN,
            )
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.advance(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        start = self.advance(length)
        # a token of a byte-level vocabulary need not be valid UTF-8 by itself
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise CheckpointError("corrupt header: unknown type of a metadata value", where=self.file, found=kind)
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.data, dtype, count, self.advance(count * dtype.itemsize)).tolist()
        # the smallest element has 8 bytes: a count that cannot fit is refused before the loop
        if self.position + 8 * count > self.size:
            self.advance(8 * count)
        return [self.value(kind) for _ in range(count)]


def read_table(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of a GGUF file.

    Raises:
        CheckpointError: no GGUF file, a version or form that is not known, a file cut or longer than its table says.
    """
    size = file_size(file)
    with open(file, "rb") as f:
        magic = f.read(4)
        if magic != b"GGUF":
            raise CheckpointError("is no GGUF file", where=file, found=magic, expected=b"GGUF", fix=FETCH_AGAIN)
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_table(file, _Cursor(file, data), size)


def _read_table(file: Path, cursor: _Cursor, size: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    cursor.advance(4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        big = version and version & 0xFFFF == 0
        found = f"{version >> 24} in big-endian form" if big else version
        raise CheckpointError("GGUF version not supported", where=file, found=found, expected="2 or 3, little-endian")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"corrupt header: {key!r} appears twice", where=file, fix=FETCH_AGAIN)
        metadata[key] = cursor.value(cursor.scalar("I"))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise CheckpointError("corrupt header: general.alignment", where=file, found=align, expected="a power of two")
    entries = [_read_entry(file, cursor) for _ in range(tensor_count)]
    start = -(-cursor.position // align) * align
    tensors = {name: GGUFTensor(name, shape, form, start + offset) for name, shape, form, offset in entries}
    if len(tensors) < len(entries):
        raise CheckpointError("corrupt header: a tensor appears twice", where=file, fix=FETCH_AGAIN)
    _check_layout(file, tensors, start, align, size)
    return metadata, tensors


def _read_entry(file: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], Form, int]:
    name, rank = cursor.text(), cursor.scalar("I")
    if rank > 4:
        raise CheckpointError(f"corrupt header: rank of {name!r}", where=file, found=rank, expected="at most 4")
    # ggml counts the fastest axis first
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    form = FORMS.get(number)
    if form is None:
        raise CheckpointError(
            f"tensor {name!r} is stored in a form that is not supported",
            where=file,
            found=f"ggml type {number}",
            expected=", ".join(form.name for form in FORMS.values()),
        )
    if form.block > 1 and (not shape or shape[-1] % form.block):
        raise CheckpointError(
            f"corrupt header: shape of {name!r}",
            where=file,
            found=shape,
            expected=f"rows of {form.block}s for {form.name}",
        )
    return name, shape, form, offset


def _check_layout(file: Path, tensors: dict[str, GGUFTensor], start: int, align: int, size: int) -> None:
    """Tensors by offset, each at the next multiple of the alignment, up to the end of the file."""
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        expected = -(-position // align) * align
        if tensor.offset != expected:
            raise CheckpointError(
                f"corrupt header: place of tensor {tensor.name!r}",
                where=file,
                found=f"byte {tensor.offset}",
                expected=f"byte {expected}",
                fix=FETCH_AGAIN,
            )
        position = tensor.offset + tensor.nbytes
    if size < position:
        raise CheckpointError(
            f"incomplete: {position} bytes expected, {size} found (the download was probably interrupted)",
            where=file,
            fix=FETCH_AGAIN,
        )
    # writers may pad the last tensor too
    if size > -(-position // align) * align:
        raise CheckpointError(
            f"{size - position} extra bytes at the end: {position} bytes expected, {size} found",
            where=file,
            fix=FETCH_AGAIN,
        )


def widen(raw: UInt8[np.ndarray, " n"], form: Form, shape: tuple[int, ...], where: Path) -> Shaped[np.ndarray, "..."]:
    """The values that the bytes `raw` stand for, in `form.dtype`; exact in float32, as ggml defines them."""
    if form.block == 1:
        return raw.view(DTYPES[form.dtype]).reshape(shape)
    blocks = raw.reshape(-1, form.nbytes)
    if form.name == "Q8_0":
        # scale, 32 signed bytes
        return (_half(blocks, 0) * blocks[:, 2:].view(np.int8)).reshape(shape)
    if form.name in ("Q4_0", "Q4_1"):
        # scale, (minimum,) 16 bytes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones
        nibbles = blocks[:, -16:]
        values = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
        if form.name == "Q4_0":
            values -= np.float32(8)
        values *= _half(blocks, 0)
        if form.name == "Q4_1":
            values += _half(blocks, 2)
        return values.reshape(shape)
    return _widen_by_package(raw, form, shape, where)


def _half(blocks: UInt8[np.ndarray, "n bytes"], at: int) -> Float32[np.ndarray, "n 1"]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _widen_by_package(
    raw: UInt8[np.ndarray, " n"], form: Form, shape: tuple[int, ...], where: Path
) -> Float32[np.ndarray, "..."]:
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as e:
        raise CheckpointError(
            f"tensors in the form {form.name} need the package gguf", where=where, fix="pip install 'eaglejax[demo]'"
        ) from e
    rows = raw.reshape(*shape[:-1], -1)
    try:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(FORM_NUMBERS[form.name]))
    except NotImplementedError as e:
        raise CheckpointError(
            f"tensors in the form {form.name} cannot be widened by the installed gguf", where=where
        ) from e
