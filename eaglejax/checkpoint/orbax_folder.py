"""An Orbax checkpoint as `eaglejax convert` writes it: the tensors of a Hugging Face checkpoint, bit for bit.

    eaglejax_orbax.json        the manifest: every tensor's group, shape, dtype and sha256; every file's size
    group-00000/ ...           one Orbax checkpoint each (OCDBT, zarr3), a flat tree {Hugging Face name: array}
    config.json, tokenizer.json, ...   the other files of the checkpoint, unchanged

Chunks run along the first axis, so a block is read without the rest of its tensor; each carries a checksum, which is
checked whenever it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint.json_file import read_json
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader, TensorInfo
from eaglejax.errors import CheckpointError

MANIFEST = "eaglejax_orbax.json"
FORMAT, VERSION = "eaglejax-orbax", 1
GROUPS = "group-*"
# in each group: the same entries that the manifest has of it
GROUP_TABLE = "eaglejax_group.json"
# names that Orbax gives to files at the top of a checkpoint
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
CONVERT_AGAIN = "convert the checkpoint again, or copy the whole folder again"
# B-tree nodes kept in memory, as much as Orbax itself keeps
CACHE_BYTES = 100_000_000


def is_orbax_folder(folder: Path) -> bool:
    """Whether `folder` is, or once was, an Orbax checkpoint; `open_orbax` says what is wrong with it."""
    names = (MANIFEST, *ORBAX_FILES)
    return any((folder / name).exists() for name in names) or any(p.is_dir() for p in folder.glob(GROUPS))


class OrbaxReader(CheckpointReader):
    """The tensors of such a folder, whose files were found whole.

    Attributes:
        digests: sha256 of each tensor's bytes, in hexadecimal digits.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]):
        super().__init__(path, tensors, metadata)
        self.digests: dict[str, str] = {}
        self._context: Any = None

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        info = self.info(name)
        return self._block(info, (slice(None),) * len(info.shape))

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        info = self.info(name)
        self._check_rows(info, start, stop)
        return self._block(info, (slice(start, stop), *(slice(None),) * (len(info.shape) - 1)))

    def read_block(
        self,
        name: str,
        index: Sequence[slice],
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> Shaped[np.ndarray, "..."]:
        """As `CheckpointReader.read_block`. Only the chunks that the block touches are read; where it is one of
        another shape or dtype, the chunks that hold its rows (index along the first axis of that shape)."""
        info = self.info(name)
        if shape is None and dtype is None:
            return self._block(info, check_block(info, index))
        seen = replace(info, shape=info.shape if shape is None else tuple(shape), dtype=dtype or info.dtype)
        check_block(seen, index)
        if not info.shape or not seen.shape or not info.size:
            return np.array(self.read(name).reshape(-1).view(DTYPES[seen.dtype]).reshape(seen.shape)[tuple(index)])
        row, seen_row = info.nbytes // info.shape[0], seen.nbytes // seen.shape[0]
        start, stop, _ = index[0].indices(seen.shape[0])
        first = start * seen_row // row
        rows = self.read_rows(name, first, max(first, -(-stop * seen_row // row)))
        data = rows.reshape(-1).view(np.uint8)[start * seen_row - first * row : stop * seen_row - first * row]
        cut = data.view(DTYPES[seen.dtype]).reshape(stop - start, *seen.shape[1:])
        return np.array(cut[(slice(None), *index[1:])])

    def _block(self, info: TensorInfo, index: Sequence[slice]) -> Shaped[np.ndarray, "..."]:
        """Only the chunks that `index` (one slice per axis, step 1) touches are read."""
        spans = [part.indices(size) for part, size in zip(index, info.shape, strict=True)]
        shape = tuple(max(0, stop - start) for start, stop, _ in spans)
        if 0 in shape:
            return np.empty(shape, DTYPES[info.dtype])
        import tensorstore

        if self._context is None:
            self._context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": CACHE_BYTES}})
        base = {"driver": "file", "path": f"{info.file.absolute()}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{info.name}/", "cache_pool": "cache_pool#ocdbt"}
        spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False, "recheck_cached_data": False}
        try:
            array = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            found = (array.dtype.numpy_dtype, tuple(array.shape))
            data = array[tuple(slice(start, stop) for start, stop, _ in spans)].read().result()
        except Exception as e:  # tensorstore raises ValueError, NotImplementedError, ... by kind of fault
            reason = " ".join(str(e).split())[:300]
            raise CheckpointError(
                f"tensor {info.name!r} cannot be read ({reason})", where=info.file, fix=CONVERT_AGAIN
            ) from e
        expected = (DTYPES[info.dtype], info.shape)
        if found != expected:
            raise CheckpointError(
                f"tensor {info.name!r} is not the one that {MANIFEST} describes",
                where=info.file,
                found=f"{found[0]} {list(found[1])}",
                expected=f"{expected[0]} {list(expected[1])}",
                fix=CONVERT_AGAIN,
            )
        self.count_bytes(data.nbytes)
        return data


def check_block(info: TensorInfo, index: Sequence[slice]) -> Sequence[slice]:
    """`index` itself; an IndexError where it is no block of the tensor: one slice per axis, step 1, within bounds."""
    fits = len(index) == len(info.shape) and all(
        part.step in (None, 1)
        and (part.start is None or 0 <= part.start <= size)
        and (part.stop is None or (part.start or 0) <= part.stop <= size)
        for part, size in zip(index, info.shape, strict=False)
    )
    if not fits:
        raise IndexError(f"{info.file}: {index} is no block of {info.name!r}, which is {list(info.shape)}")
    return index


def open_orbax(folder: Path) -> OrbaxReader:
    """The tensors of an Orbax folder; the manifest is read, and every file that it names is looked for.

    Raises:
        CheckpointError: no manifest, a manifest of another version or one that contradicts itself; a group or a file
        that is missing, cut or not in the manifest; a tensor that manifest and group do not describe alike.
    """
    file = folder / MANIFEST
    if not file.exists():
        raise CheckpointError(
            f"is an Orbax checkpoint without {MANIFEST}, the table of its tensors",
            where=folder,
            found=", ".join(sorted(p.name for p in folder.iterdir())[:6]),
            expected="a folder that 'eaglejax convert --to=orbax' has finished",
            fix=CONVERT_AGAIN,
        )
    manifest = read_json(file)
    if (found := (manifest.get("format"), manifest.get("version"))) != (FORMAT, VERSION):
        raise CheckpointError(
            "is of another format or version", where=file, found=found, expected=f"{(FORMAT, VERSION)}"
        )
    try:
        groups: dict[str, Any] = dict(manifest["groups"])
        reader = OrbaxReader(folder, _table(folder, groups), dict(manifest["metadata"]))
        reader.digests = {
            name: entry["sha256"] for group in groups.values() for name, entry in group["tensors"].items()
        }
        count = manifest["group_count"]
        files = {name: dict(group["files"]) for name, group in groups.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(f"contradicts itself ({type(e).__name__}: {e})", where=file, fix=CONVERT_AGAIN) from e
    there = {path.name for path in folder.glob(GROUPS) if path.is_dir()}
    if len(groups) != count or there != groups.keys():
        missing, extra = sorted(groups.keys() - there), sorted(there - groups.keys())
        named = [
            f"{word} {', '.join(names[:3])}" for word, names in (("missing:", missing), ("extra:", extra)) if names
        ]
        raise CheckpointError(
            f"the groups are not those of {MANIFEST}" + (f" ({'; '.join(named)})" if named else ""),
            where=folder,
            found=f"{len(there)} groups, {len(groups)} in the table",
            expected=f"{count} groups",
            fix=CONVERT_AGAIN,
        )
    for name, sizes in files.items():
        _check_files(folder / name, sizes)
        _check_tensors(folder / name, groups[name]["tensors"])
    return reader


def _table(folder: Path, groups: Mapping[str, Any]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for group, content in groups.items():
        if Path(group).name != group or not Path(group).match(GROUPS):
            raise ValueError(f"{group!r} is no group's name")
        for name, entry in content["tensors"].items():
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if name in tensors or dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"entry of tensor {name!r}")
            tensors[name] = TensorInfo(name, shape, dtype, folder / group, 0, stored=dtype)
    return tensors


def _check_files(group: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        file = group / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise CheckpointError(
                "is missing" if found is None else "is cut or was changed",
                where=file,
                found=None if found is None else f"{found} bytes",
                expected=f"{size} bytes",
                fix=CONVERT_AGAIN,
            )


def _check_tensors(group: Path, listed: Mapping[str, Any]) -> None:
    """A tensor that is no longer in the manifest would be missed by nobody, so each group tells its own."""
    own = read_json(group / GROUP_TABLE).get("tensors")
    if not isinstance(own, dict):
        raise CheckpointError("has no tensors", where=group / GROUP_TABLE, fix=CONVERT_AGAIN)
    for what, names in (
        (f"in the group, and not in {MANIFEST}", own.keys() - listed.keys()),
        (f"in {MANIFEST}, and not in the group", listed.keys() - own.keys()),
        (
            f"told in another way by {MANIFEST}",
            {name for name in own.keys() & listed.keys() if own[name] != listed[name]},
        ),
    ):
        if names:
            shown = ", ".join(map(repr, sorted(names)[:3])) + (" ..." if len(names) > 3 else "")
            raise CheckpointError(
                f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {shown}",
                where=group / GROUP_TABLE,
                fix=CONVERT_AGAIN,
            )
