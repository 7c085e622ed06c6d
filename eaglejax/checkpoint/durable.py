"""Writes that a kill or a power loss leaves either undone or done: synced first, renamed into place last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eaglejax.errors import CheckpointError

TEMPORARY = ".writing"


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """`sync` for everything in `folder`, and for itself."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def move(source: Path, target: Path) -> None:
    """Gives a synced file or folder its final name, in the same parent."""
    os.rename(source, target)
    sync(target.parent)


def write_json(file: Path, value: Any) -> None:
    """Writes or replaces a JSON file; it is never seen half-written."""
    draft = file.with_name(file.name + TEMPORARY)
    with open(draft, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(draft, file)
    sync(file.parent)


def replace_file(file: Path, content: bytes) -> None:
    """Writes or replaces a file; it is never seen half-written."""
    draft = file.with_name(file.name + TEMPORARY)
    with open(draft, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(draft, file)
    sync(file.parent)


@contextmanager
def locked(folder: Path, what: str = "convert") -> Iterator[None]:
    """Holds `folder` for this process, which does `what`; the lock goes with the process, however that ends.

    Raises:
        CheckpointError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows, which has no such locks on folders
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another {what} is writing here", where=folder, fix="wait until it is done"
            ) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def swap_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the place of `folder` once it is filled.

    A kill in between leaves the old one, or for a moment none; never a mixture.
    """
    fresh, old = folder.with_name(folder.name + TEMPORARY), folder.with_name(folder.name + ".old")
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    sync_tree(fresh)
    if folder.exists():
        os.rename(folder, old)
    move(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
