"""`convert`: a checkpoint from one form into another, bit for bit; a run that was killed is continued by the next."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglejax.checkpoint import orbax_folder
from eaglejax.checkpoint.convert_parts import Files, Groups, Parts, cut
from eaglejax.checkpoint.convert_record import RECORD, Record, make_record, read_record, save_record
from eaglejax.checkpoint.durable import TEMPORARY, locked, move, sync, write_json
from eaglejax.checkpoint.quantise import QuantisedReader, check_quantise, quantised_config
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.checkpoint.tensors import CheckpointReader, TensorInfo
from eaglejax.errors import CheckpointError, ConfigError

FORMS = ("orbax", "safetensors")
# bytes of a group, which is what a killed run does again at most, and of a file
MAX_BYTES = {"orbax": 2 * 10**9, "safetensors": 5 * 10**9}
# free space kept beyond the bytes of the tensors: headers, tables, blocks half filled
SPARE_BYTES = 16 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5", ".onnx")
# what belongs to a model whose weights were given as one file, which may lie among anything
COMPANIONS = ("*config*.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja")

# begins a progress bar over so many bytes; what it yields is called with the bytes done since the last call
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes:
        to: "orbax" or "safetensors".
        tensors, nbytes: number of tensors, and their bytes, of the whole checkpoint.
        parts, kept: groups or files of the whole checkpoint, and how many of them an earlier run had made.
        written: bytes of tensors written in this run; seconds: its wall time.
        left_out: names in the source's folder that were not taken along (folders, other forms of the weights).
        already_done: whether the target held this very conversion before.
        left_plain: names of projections that `quantize` left as they are (`QuantisedReader.left_plain`).
    """

    source: Path
    target: Path
    to: str
    tensors: int
    nbytes: int
    parts: int
    kept: int
    written: int
    seconds: float
    left_out: tuple[str, ...]
    already_done: bool
    left_plain: tuple[str, ...] = ()


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    max_bytes: int | None = None,
    quantize: str | None = None,
    progress: Progress = lambda total: nullcontext(lambda done: None),
) -> Conversion:
    """Writes the checkpoint `source` to the folder `target`, every tensor with its name, dtype and bytes.

    Everything is written to `target` + ".partial" beside it, which gets its final name as the last step. Where such a
    folder of the same source and settings is found, its complete parts are kept.

    Arguments:
        source: whatever `from_pretrained` takes, GGUF files excepted.
        to: "orbax" (groups of whole tensors, see `orbax_folder`) or "safetensors" (Hugging Face's form).
        max_bytes: bytes of a group or a file at most (a larger tensor has one of its own); default 2 GB, 5 GB.
        quantize: "int8" or "int4" quantises the projections of the layers (see `quantise`); None leaves every tensor as
            it is.
        progress: begins a progress bar over the bytes still to be written.

    Raises:
        ConfigError: `to`, `max_bytes` or `quantize` is impossible. CheckpointError: the source cannot be read, or has
        changed; the target exists and is not this very conversion; there is too little space.
    """
    if to not in FORMS:
        raise ConfigError("no form of a checkpoint", where="to", found=repr(to), expected=" or ".join(FORMS))
    max_bytes = MAX_BYTES[to] if max_bytes is None else max_bytes
    if max_bytes < 1:
        raise ConfigError("out of range", where="max_bytes", found=max_bytes, expected="at least 1")
    begin = time.perf_counter()
    found = resolve(source)
    goal = _checked_target(Path(target).expanduser(), found)
    plain = _open(found)
    reader, config = _quantised(plain, found.folder, quantize)
    companions, left_out = _companions(found, {info.file.name for info in plain.tensors.values()}, plain.text_folder)
    settings = {"to": to, "max_bytes": max_bytes, "quantize": quantize or ""}
    job = _Job(
        goal=goal,
        reader=reader,
        parts=cut(reader, max_bytes),
        companions=companions,
        config=config,
        record=make_record(plain, companions, **settings),
        record_now=lambda: make_record(open_checkpoint(found.path), companions, **settings),
    )
    already_done = goal.exists()
    if already_done:
        _refuse_other(goal, job.record)
    kept, written = (len(job.parts), 0) if already_done else job.run(progress)
    return Conversion(
        source=found.path,
        target=goal,
        to=to,
        tensors=len(reader.tensors),
        nbytes=sum(info.nbytes for info in reader.tensors.values()),
        parts=len(job.parts),
        kept=kept,
        written=written,
        seconds=time.perf_counter() - begin,
        left_out=left_out,
        already_done=already_done,
        left_plain=tuple(reader.left_plain) if isinstance(reader, QuantisedReader) else (),
    )


@dataclass(frozen=True)
class _Job:
    """A conversion that was checked and may begin. `config`: what replaces the source's config.json, if anything."""

    goal: Path
    reader: CheckpointReader
    parts: list[list[TensorInfo]]
    companions: list[Path]
    config: dict[str, Any] | None
    record: Record
    record_now: Callable[[], Record]

    def run(self, progress: Progress) -> tuple[int, int]:
        """Makes what is missing and gives it all its final name. Returns the parts that were there, and the bytes of
        the others."""
        partial = self.goal.with_name(self.goal.name + ".partial")
        _make(partial)
        with locked(partial):
            try:
                _continue_or_begin(partial, self.record)
                writer = (Groups if self.record.to == "orbax" else Files)(partial, self.reader, self.parts)
                todo = writer.todo()
                missing = sum(info.nbytes for index in todo for info in self.parts[index])
                _check_space(partial, missing + sum(path.stat().st_size for path in self.companions))
                with progress(missing) as advance:
                    for index in todo:
                        writer.write(index, advance)
                self._finish(partial, writer)
            except OSError as e:
                raise CheckpointError(
                    f"cannot be written ({e.strerror or e})",
                    where=partial,
                    fix="see to that; the next run continues here",
                ) from e
        return len(self.parts) - len(todo), missing

    def _finish(self, partial: Path, writer: Parts) -> None:
        writer.finish()
        _copy(self.companions, partial)
        if self.config is not None:
            write_json(partial / "config.json", self.config)
        if difference := self.record.difference(self.record_now()):
            raise CheckpointError("the source changed while it was converted", where=self.reader.path, found=difference)
        save_record(partial, self.record, complete=True)
        if self.goal.exists():
            raise CheckpointError("came into being during the conversion", where=self.goal)
        move(partial, self.goal)


def _open(source: Source) -> CheckpointReader:
    if source.kind == "gguf":
        raise CheckpointError(
            "a GGUF file is not converted: its weights would have to be widened, and its tokenizer rebuilt",
            where=source.path,
            expected="the checkpoint in Hugging Face format that it was made from",
        )
    reader = open_checkpoint(source.path)
    if reader.gguf_tokenizer is not None:
        raise CheckpointError(
            "a difference on a GGUF file is not converted: the base's weights would have to be widened, and its tokenizer"
            " rebuilt",
            where=source.path,
            expected="a difference on a base in Hugging Face format",
        )
    return reader


def _quantised(
    plain: CheckpointReader, folder: Path, kind: str | None
) -> tuple[CheckpointReader, dict[str, Any] | None]:
    """The tensors to write, and the config.json that must replace the source's."""
    if kind is None:
        return plain, plain.hf_config
    config = check_quantise(kind, folder, plain.hf_config)
    reader = QuantisedReader(plain, kind)
    return reader, quantised_config(config, reader)


def _checked_target(target: Path, source: Source) -> Path:
    goal, origin = target.resolve(), source.path.resolve()
    if goal.is_relative_to(origin):
        raise CheckpointError(
            "the target lies inside the source" if goal != origin else "the target is the source",
            where=target,
            expected=f"a folder outside {source.path}",
        )
    if not goal.parent.is_dir():
        raise CheckpointError("no such folder to write into", where=goal.parent, fix="make it first")
    return goal


def _refuse_other(goal: Path, record: Record) -> None:
    """Returns only where `goal` is this very conversion, whole."""
    found = read_record(goal) if goal.is_dir() else None
    difference = "not made by 'eaglejax convert'" if found is None else record.difference(found[0])
    if difference:
        raise CheckpointError(
            "exists already, and is not this conversion", where=goal, found=difference, fix="remove it, or name another"
        )
    open_checkpoint(goal)


def _make(partial: Path) -> None:
    try:
        partial.mkdir(exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"cannot be made ({e.strerror or e})", where=partial, fix="name another target") from e


def _continue_or_begin(partial: Path, record: Record) -> None:
    found = read_record(partial)
    if found is None:
        others = [path.name for path in partial.iterdir() if not path.name.endswith(TEMPORARY)]
        if others:
            raise CheckpointError(
                "is in the way, and holds no conversion", where=partial, found=", ".join(others[:3]), fix="remove it"
            )
    elif difference := record.difference(found[0]):
        raise CheckpointError(
            "a conversion was begun here that is not this one",
            where=partial,
            found=difference,
            fix="remove the folder to begin anew",
        )
    for path in partial.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if found is None:
        save_record(partial, record, complete=False)


def _check_space(folder: Path, needed: int) -> None:
    needed += SPARE_BYTES + needed // 200
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            "too little space on the disk",
            where=folder,
            found=f"{free / 1e9:.3f} GB free",
            expected=f"{needed / 1e9:.3f} GB",
            fix="make room; the next run continues here",
        )


def _companions(source: Source, read: set[str], text: Path | None) -> tuple[list[Path], tuple[str, ...]]:
    """The files that go along with the weights, and the names of what stays behind. `text`: the folder of a base, whose
    tokenizer goes along too."""
    own = (RECORD, orbax_folder.MANIFEST)
    there = {path.name for path in source.folder.iterdir()}
    base = [] if text is None else [path for path in _known(text, own) if path.name not in there]
    if source.kind != "folder":
        return base + _known(source.folder, own), ()
    taken, left = base, []
    for path in sorted(source.folder.iterdir()):
        if path.name.startswith(".") or path.name in own or path.name in read:
            continue
        if path.is_file() and not path.name.endswith(WEIGHTS):
            taken.append(path)
        elif not path.name.endswith(".index.json"):
            left.append(path.name)
    return taken, tuple(left)


def _known(folder: Path, own: tuple[str, ...]) -> list[Path]:
    """The files of a folder, which may hold anything, that belong to a model."""
    files = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if path.name not in own and not path.name.endswith(WEIGHTS))


def _copy(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        shutil.copyfile(file, folder / file.name)
        sync(folder / file.name)
    sync(folder)
