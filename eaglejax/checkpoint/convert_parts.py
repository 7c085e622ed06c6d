"""The parts that a conversion is made of: groups of an Orbax folder, or files of a Hugging Face folder."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from eaglejax.checkpoint import orbax_folder
from eaglejax.checkpoint.durable import TEMPORARY, move, sync_tree, write_json
from eaglejax.checkpoint.json_file import read_json
from eaglejax.checkpoint.orbax_folder import OrbaxReader
from eaglejax.checkpoint.safetensors_writer import write_file
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader, TensorInfo
from eaglejax.errors import CheckpointError

# bytes held in memory at a time where a tensor can be read in pieces
PIECE_BYTES = 64 << 20


def cut(reader: CheckpointReader, max_bytes: int) -> list[list[TensorInfo]]:
    """The tensors in the source's order, cut into parts of at most `max_bytes`."""
    parts: list[list[TensorInfo]] = [[]]
    size = 0
    for info in reader.tensors.values():
        if parts[-1] and size + info.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(info)
        size += info.nbytes
    return parts


def _pieces(reader: CheckpointReader, info: TensorInfo) -> Iterator[Shaped[np.ndarray, "..."]]:
    """The elements of a tensor in order; in pieces where the reader reads rows without reading the whole."""
    if type(reader) not in (CheckpointReader, OrbaxReader) or not info.shape or info.nbytes <= PIECE_BYTES:
        yield reader.read(info.name)
        return
    rows = max(1, PIECE_BYTES // (info.nbytes // info.shape[0]))
    for start in range(0, info.shape[0], rows):
        yield reader.read_rows(info.name, start, min(start + rows, info.shape[0]))


def _check_digest(reader: CheckpointReader, name: str, digest: str) -> None:
    """An Orbax folder says what its tensors' bytes were when they were put in."""
    expected = reader.digests[name] if isinstance(reader, OrbaxReader) else digest
    if digest != expected:
        raise CheckpointError(
            f"tensor {name!r} is damaged: its sha256 is not the one in {orbax_folder.MANIFEST}",
            where=reader.info(name).file,
            found=digest,
            expected=expected,
            fix=orbax_folder.CONVERT_AGAIN,
        )


class Parts(abc.ABC):
    """The parts of a conversion, each written beside its final name and moved there when it is whole.

    Attributes:
        folder: where they go. reader: the source. parts: the tensors of each.
    """

    def __init__(self, folder: Path, reader: CheckpointReader, parts: list[list[TensorInfo]]):
        self.folder, self.reader, self.parts = folder, reader, parts

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Final name of a part in the folder."""

    @abc.abstractmethod
    def write(self, index: int, advance: Callable[[int], None]) -> None:
        """Writes a part; `advance` is called with the bytes done since the last call."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Writes the table over all parts."""

    def todo(self) -> list[int]:
        """The parts that are not there yet."""
        return [index for index in range(len(self.parts)) if not (self.folder / self.name(index)).exists()]


class Files(Parts):
    """The shards of a Hugging Face folder."""

    def name(self, index: int) -> str:
        count = len(self.parts)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def write(self, index: int, advance: Callable[[int], None]) -> None:
        def pieces(info: TensorInfo) -> Iterator[Shaped[np.ndarray, "..."]]:
            digest = hashlib.sha256()
            for piece in _pieces(self.reader, info):
                yield piece
                digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                advance(piece.nbytes)
            _check_digest(self.reader, info.name, digest.hexdigest())

        final = self.folder / self.name(index)
        draft = final.with_name(final.name + TEMPORARY)
        # transformers reads no file that does not say which framework's layout it has
        write_file(draft, self.parts[index], {"format": "pt"} | self.reader.metadata, pieces)
        move(draft, final)

    def finish(self) -> None:
        if len(self.parts) == 1:
            return
        weight_map = {info.name: self.name(index) for index, part in enumerate(self.parts) for info in part}
        size = sum(info.nbytes for part in self.parts for info in part)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self.folder / "model.safetensors.index.json", index)


class Groups(Parts):
    """The groups of an Orbax folder."""

    def __init__(self, folder: Path, reader: CheckpointReader, parts: list[list[TensorInfo]]):
        super().__init__(folder, reader, parts)
        if odd := [name for name in reader.tensors if "/" in name or not name]:
            raise CheckpointError(
                "a tensor's name cannot be the name of an Orbax array", where=reader.path, found=repr(odd[0])
            )

    def name(self, index: int) -> str:
        return f"group-{index:05}"

    def write(self, index: int, advance: Callable[[int], None]) -> None:
        from eaglejax.checkpoint.orbax_group import save_group

        final = self.folder / self.name(index)
        draft = final.with_name(final.name + TEMPORARY)
        tensors, table = {}, {}
        for info in self.parts[index]:
            array = self._array(info)
            digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
            _check_digest(self.reader, info.name, digest)
            table[info.name] = {"shape": list(info.shape), "dtype": info.dtype, "sha256": digest}
            if info.size:
                tensors[info.name] = array
        try:
            save_group(draft, tensors, advance)
        except OSError:
            raise
        except Exception as e:  # tensorstore raises ValueError and others by kind of fault
            reason = " ".join(str(e).split())[:300]
            raise CheckpointError(
                f"Orbax cannot save this group ({type(e).__name__}: {reason})",
                where=draft,
                fix="the next run continues here",
            ) from e
        files = {path.relative_to(draft).as_posix(): path.stat().st_size for path in draft.rglob("*") if path.is_file()}
        write_json(draft / orbax_folder.GROUP_TABLE, {"files": dict(sorted(files.items())), "tensors": table})
        sync_tree(draft)
        move(draft, final)

    def _array(self, info: TensorInfo) -> Shaped[np.ndarray, "..."]:
        """A view of the mapped file where its bytes are the tensor's, so that a group is never in memory as a whole.
        (tensorstore copies views that are not aligned to their dtype, which files by the format's own library are.)"""
        if type(self.reader) is not CheckpointReader or not info.size:
            return self.reader.read(info.name)
        data = np.memmap(info.file, np.uint8, "r", info.offset, (info.nbytes,))
        return np.asarray(data).view(DTYPES[info.dtype]).reshape(info.shape)

    def finish(self) -> None:
        names = [self.name(index) for index in range(len(self.parts))]
        groups = {name: read_json(self.folder / name / orbax_folder.GROUP_TABLE) for name in names}
        manifest = {
            "format": orbax_folder.FORMAT,
            "version": orbax_folder.VERSION,
            "metadata": self.reader.metadata,
            "group_count": len(groups),
            "groups": groups,
        }
        write_json(self.folder / orbax_folder.MANIFEST, manifest)
