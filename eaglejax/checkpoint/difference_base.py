"""The base of a difference: what a config.json says of it, and where it lies. Nothing here takes jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eaglejax.checkpoint.builtin import builtin_names
from eaglejax.checkpoint.difference import FILE, FORM
from eaglejax.checkpoint.json_file import read_json
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.errors import CheckpointError
from eaglejax.models.capture import MANIFEST_KEY

BASE, DIFFERENCE = "base", "difference"


def difference_folder(path: Path) -> Path | None:
    """The folder of the difference that `path`, a folder or the file of weights in it, is; None for anything else.

    Raises CheckpointError where there is a config.json that cannot be read.
    """
    folder = path.parent if path.name == FILE and not path.is_dir() else path
    if not (folder / "config.json").is_file():
        return None
    manifest = read_json(folder / "config.json").get(MANIFEST_KEY)
    # a draft has a manifest of other keys
    found = isinstance(manifest, Mapping) and bool({BASE, DIFFERENCE} & manifest.keys())
    return folder if found else None


def find_base(folder: Path) -> tuple[str, Source]:
    """What the difference in `folder` calls its base, and where that lies; a built-in one is fetched.

    Raises:
        CheckpointError: a manifest that is not understood; no such base; a base that is a difference itself.
    """
    where = folder / "config.json"
    manifest = read_json(where)[MANIFEST_KEY]
    if unknown := sorted(manifest.keys() - {BASE, DIFFERENCE}):
        raise CheckpointError(
            "a difference with keys that are not understood",
            where=f"{where}: {MANIFEST_KEY}",
            found=", ".join(unknown),
            expected=f"{BASE} and {DIFFERENCE}",
            fix="correct config.json, or use the version of eaglejax that wrote it",
        )
    if (form := manifest.get(DIFFERENCE)) != FORM:
        raise CheckpointError(
            "a form of difference that is not known",
            where=f"{where}: {MANIFEST_KEY}.{DIFFERENCE}",
            found=repr(form),
            expected=repr(FORM),
        )
    name = manifest.get(BASE)
    names = ", ".join(builtin_names())
    expected = f"a built-in model ({names}), or a path relative to {folder}"
    if not isinstance(name, str) or not name.strip():
        raise CheckpointError(
            "names no base", where=f"{where}: {MANIFEST_KEY}.{BASE}", found=repr(name), expected=expected
        )
    path = folder / name
    if name not in builtin_names() and not path.exists():
        raise CheckpointError(
            "the base of this difference is not there",
            where=f"{where}: {MANIFEST_KEY}.{BASE}",
            found=f"{name!r}, and no {path}",
            expected=expected,
            fix="put the base model there, or correct the name",
        )
    source = resolve(name if name in builtin_names() else path)
    if difference_folder(source.path) is not None:
        raise CheckpointError(
            "the base of this difference is a difference itself",
            where=f"{where}: {MANIFEST_KEY}.{BASE}",
            found=repr(name),
            expected="a whole dense model",
        )
    return name, source
