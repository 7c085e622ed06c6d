"""The folder of a run: made, held, and known to be writable before anything heavy is loaded; and the run that it holds."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from eaglejax.checkpoint.durable import TEMPORARY, locked
from eaglejax.errors import CheckpointError

EXPORT, ANSWERS = "draft", "answers.jsonl"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, again: str = "run the same command") -> Iterator[None]:
    """Raises CheckpointError with path and reason where what is done under it meets a fault of the disk.

    Arguments:
        again: what the user does once the fault is gone.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        full = number in _NO_SPACE or "os error 28" in str(error)
        fix = f"free space there and {again}" if full else "name a folder that can be written to"
        reason = getattr(error, "strerror", None) or str(error)
        where = getattr(error, "filename", None) or path
        raise CheckpointError("cannot be written", where=where, found=reason, fix=fix) from error


@contextmanager
def run_folder(out: Path, files: tuple[str, ...], folders: tuple[str, ...]) -> Iterator[None]:
    """Makes and holds the folder of a run; one that it made goes again where nothing was put into it.

    Arguments:
        files, folders: what the run will write, and write into.

    Raises CheckpointError where the folder or such a file cannot be written, or another run holds it.
    """
    for folder in (out, *(out / name for name in folders)):
        if os.path.lexists(folder) and not folder.is_dir():
            raise CheckpointError("is a file", where=folder, expected="a folder", fix="name another folder: out")
    fresh = not out.exists()
    probe = out / f"probe{TEMPORARY}"
    try:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            next(out.iterdir(), None)
            try:
                probe.write_bytes(b"-")
            finally:
                probe.unlink(missing_ok=True)
            for name in files:
                if (out / name).exists():
                    open(out / name, "ab").close()
        with locked(out, "training run"):
            yield
    finally:
        if fresh:
            with suppress(OSError):  # it holds something, as after every run that took a step
                out.rmdir()


def run_facts(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], Path] | None:
    """What the newest checkpoint among `names` says of its run, and where it stands; read without opening the run.

    Raises CheckpointError where it cannot be read.
    """
    for name in names:
        steps = [int(p.name) for p in (folder / name).glob("*") if p.name.isdigit() and (p / "facts").exists()]
        if steps:
            place = folder / name / str(max(steps))
            try:
                return json.loads((place / "facts" / "metadata").read_text(encoding="utf-8")), place
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's facts cannot be read ({error})",
                    where=place,
                    fix=f"remove {place}: the run goes on from the one before",
                ) from None
    return None


def trained(source: str) -> str:
    """The draft's folder where `source` is the folder of a run, else `source` itself."""
    inside = Path(source) / EXPORT
    return str(inside) if (inside / "config.json").exists() else source
