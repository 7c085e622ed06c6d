"""Files and folders to be written at the end: looked at before minutes are spent, and left as they were. Imports nothing heavy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eaglejax.errors import ConfigError


def check_file(path: Path, where: str, *, replaced: bool) -> None:
    """Raises ConfigError naming `where` if the file could not be written. Nothing stays of the attempt: a run that is refused or killed
    later leaves no empty file or folder behind.

    replaced: it will be made in its folder, which may have to be made too, and renamed; otherwise it is written where it is.
    """
    with _as_it_was(path.parent if replaced else None, where, "name another file"):
        if path.exists():
            path.open("a", encoding="utf-8").close()
        if not path.exists() or (replaced and path.is_file()):
            with tempfile.TemporaryFile(dir=path.parent):
                pass


def check_folder(path: Path, where: str) -> None:
    """Raises ConfigError naming `where` if no file could be written into the folder. Nothing stays of the attempt."""
    with _as_it_was(path, where, "name another folder"), tempfile.TemporaryFile(dir=path):
        pass


@contextmanager
def _as_it_was(folder: Path | None, where: str, fix: str) -> Iterator[None]:
    """Make a folder with those above it for as long as the body runs."""
    made: list[Path] = []
    try:
        missing = [] if folder is None else [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir()
            made.append(each)
        yield
    except OSError as error:
        raise ConfigError("cannot be written", where=where, found=error.strerror, fix=fix) from None
    finally:
        for each in reversed(made):
            with suppress(OSError):  # another process may use it by now
                each.rmdir()
