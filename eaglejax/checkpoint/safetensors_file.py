"""The header of a safetensors file, checked to the last byte before any tensor is read.

The format: 8 bytes little-endian length n, n bytes JSON {name: {dtype, shape, data_offsets}}, then the tensors.
The kept library raises one terse error for most faults below; here each says what is wrong and what to do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.pointer import FETCH_AGAIN, file_size
from eaglejax.checkpoint.tensors import DTYPES, TensorInfo
from eaglejax.errors import CheckpointError

# the limit of the format's own library
MAX_HEADER = 100_000_000


def read_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the `__metadata__` of a safetensors file.

    Raises:
        CheckpointError: the file is missing, cut, too long, a stand-in, or its header contradicts itself.
    """
    size = file_size(file)
    if size < 8:
        raise _cut(file, "a safetensors file begins with 8 bytes of header length", size, 8)
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if length > MAX_HEADER:
            raise CheckpointError(
                "is corrupt or no safetensors file: its header length is absurd",
                where=file,
                found=f"{length} bytes",
                expected=f"at most {MAX_HEADER}",
                fix=FETCH_AGAIN,
            )
        if 8 + length > size:
            raise _cut(file, "the header itself is cut", size, 8 + length, at_least=True)
        raw = f.read(length)
    header = _parse(file, raw)
    metadata = _metadata(file, header.pop("__metadata__", {}))
    start = 8 + length
    spans = {name: _span(file, name, entry) for name, entry in header.items()}
    _check_layout(file, {name: span[2:] for name, span in spans.items()}, start, size)
    tensors = {
        name: TensorInfo(name, shape, dtype, file, start + begin, stored=dtype)
        for name, (dtype, shape, begin, _) in spans.items()
    }
    return tensors, metadata


def _cut(file: Path, why: str, found: int, expected: int, at_least: bool = False) -> CheckpointError:
    return CheckpointError(
        f"incomplete: {'at least ' if at_least else ''}{expected} bytes expected, {found} found ({why})",
        where=file,
        fix=FETCH_AGAIN,
    )


def _corrupt(file: Path, what: str, *, found: object = None, expected: object = None) -> CheckpointError:
    return CheckpointError(f"corrupt header: {what}", where=file, found=found, expected=expected, fix=FETCH_AGAIN)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ; json itself would keep the last of two."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise _corrupt(file, f"no valid JSON ({e})") from e
    if not isinstance(header, dict):
        raise _corrupt(file, "no JSON object", found=type(header).__name__)
    return header


def _metadata(file: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(file, "__metadata__ must map text to text")
    return metadata


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _span(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and the first and last byte (not included) within the data of one tensor."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise _corrupt(file, f"entry of tensor {name!r}", found=found, expected="dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"unknown dtype of tensor {name!r}",
            where=file,
            found=repr(dtype),
            expected=f"one of {', '.join(DTYPES)}",
            fix="convert the checkpoint",
        )
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _corrupt(file, f"shape of tensor {name!r}", found=shape, expected="a list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise _corrupt(
            file, f"data_offsets of tensor {name!r}", found=offsets, expected="[begin, end] with begin <= end"
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise _corrupt(
            file,
            f"tensor {name!r} of shape {shape} and dtype {dtype}",
            found=f"{end - begin} bytes",
            expected=f"{expected} bytes",
        )
    return dtype, tuple(shape), begin, end


def _check_layout(file: Path, spans: dict[str, tuple[int, int]], start: int, size: int) -> None:
    """The tensors must tile the data: no overlap, no gap, nothing after the last."""
    position, before = 0, None
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin < position:
            raise _corrupt(file, f"tensors {before!r} and {name!r} overlap by {position - begin} bytes")
        if begin > position:
            raise _corrupt(file, f"{begin - position} bytes before tensor {name!r} belong to no tensor")
        position, before = end, name
    expected = start + position
    if size < expected:
        raise _cut(file, "the download was probably interrupted", size, expected)
    if size > expected:
        raise CheckpointError(
            f"{size - expected} extra bytes at the end: {expected} bytes expected, {size} found",
            where=file,
            fix=FETCH_AGAIN,
        )
