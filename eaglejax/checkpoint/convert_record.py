"""What a conversion was made of: kept in its folder, so that the next run knows whether to continue, to stop or to
refuse."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.durable import write_json
from eaglejax.checkpoint.json_file import read_json
from eaglejax.checkpoint.tensors import CheckpointReader
from eaglejax.errors import CheckpointError

RECORD = "eaglejax_convert.json"
FORMAT, VERSION = "eaglejax-convert", 1


@dataclass(frozen=True)
class Record:
    """Source and settings of a conversion.

    Attributes:
        to: "orbax" or "safetensors".
        max_bytes: bytes of a group or a file at most.
        quantize: "int8", "int4", or "" for every tensor as it is.
        tensors: sha256 over the names, shapes, dtypes and places of all tensors, from the files' headers.
        files: (bytes, time of the last change in ns) of every file of the source that is read, by its name; of files of
            one name in two folders (a difference and its base), by the whole path.
    """

    to: str
    max_bytes: int
    quantize: str
    tensors: str
    files: dict[str, tuple[int, int]]

    def difference(self, other: Record) -> str | None:
        """How `other` differs, all of it in words and by the flags that say so; None where it does not."""
        found = [
            f"{theirs}, not {ours}"
            for ours, theirs in zip(self._flags(), other._flags(), strict=True)
            if ours != theirs
        ]
        names = [n for n in sorted(self.files.keys() | other.files) if self.files.get(n) != other.files.get(n)]
        if names:
            found.append(f"another or changed source: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
        elif self.tensors != other.tensors:
            found.append("another or changed source: its table of tensors")
        return ", and ".join(found) or None

    def _flags(self) -> tuple[str, str, str]:
        quantize = f"--quantize={self.quantize}" if self.quantize else "no --quantize"
        size = f"--max_shard_gb={self.max_bytes / 1e9:.9g} ({self.max_bytes} bytes)"
        return f"--to={self.to}", size, quantize


def make_record(
    reader: CheckpointReader, companions: list[Path], *, to: str, max_bytes: int, quantize: str = ""
) -> Record:
    """The record of a conversion that is about to run, from headers and file times; no tensor is read."""
    table = hashlib.sha256()
    files: dict[str, tuple[int, int]] = {}
    for name, info in sorted(reader.tensors.items()):
        table.update(json.dumps([name, info.shape, info.dtype, info.file.name, info.offset]).encode())
    paths = {info.file for info in reader.tensors.values()}.union(companions)
    names = Counter(path.name for path in paths)
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                status = file.stat()
                name = file.resolve() if names[path.name] > 1 else file.relative_to(path.parent)
                files[name.as_posix()] = (status.st_size, status.st_mtime_ns)
    return Record(to, max_bytes, quantize, table.hexdigest(), dict(sorted(files.items())))


def save_record(folder: Path, record: Record, *, complete: bool) -> None:
    """Writes the record of a conversion that has begun, or of one that is complete but for its name."""
    write_json(folder / RECORD, {"format": FORMAT, "version": VERSION, "complete": complete, **asdict(record)})


def read_record(folder: Path, fix: str = "remove the folder and convert again") -> tuple[Record, bool] | None:
    """The record of a folder and whether its conversion is complete; None where the folder holds none.

    Arguments:
        fix: what to do about a record that cannot be read.

    Raises:
        CheckpointError: it is cut, or of another version.
    """
    file = folder / RECORD
    if not file.is_file():
        return None
    values: dict[str, Any] = read_json(file)
    try:
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
        files = {str(name): (int(size), int(time)) for name, (size, time) in values["files"].items()}
        record = Record(
            str(values["to"]), int(values["max_bytes"]), str(values["quantize"]), str(values["tensors"]), files
        )
        return record, values["complete"] is True
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise CheckpointError(
            f"is no record of a conversion that this version knows ({type(e).__name__}: {e})",
            where=file,
            fix=fix,
        ) from e


def refuse_unfinished(folder: Path) -> None:
    """Refuses a folder, about to be read, that a conversion has begun and not finished."""
    found = read_record(
        folder,
        fix="use the version of eaglejax that wrote it; if 'eaglejax convert' did not, remove that file alone",
    )
    if found is not None and not found[1]:
        raise CheckpointError(
            "is a conversion that was not finished",
            where=folder,
            fix="run the same 'eaglejax convert' again: it continues where it stopped, and gives the folder its name",
        )
