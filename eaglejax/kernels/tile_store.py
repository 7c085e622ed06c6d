"""Tiles that were measured: one JSON file per kind of device in the user's cache folder, read once per process.

EAGLEJAX_TILES says which are taken: "auto" (the default; those of this device), "rule" (none), or a file. A file that does not fit is
refused where it was named, and left out with a warning where it was only found; the rules serve then. Several processes that run one
program have to trace the same one: what each finds in a cache folder of its own is not taken there, only a file that is named.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from eaglejax.checkpoint.builtin import cache_folder
from eaglejax.checkpoint.durable import locked, write_json
from eaglejax.errors import ConfigError
from eaglejax.kernels import select
from eaglejax.kernels.tile_candidates import candidates, whole
from eaglejax.kernels.tiles import CHOICES, SHAPES, Choice, Key
from eaglejax.load_report import LoadReport

VARIABLE = "EAGLEJAX_TILES"
VERSION = 1  # of the file, and of what a choice means to the kernels
FIX = "measure them again: eaglejax tune_kernels"


@dataclass(frozen=True)
class Here:
    """What stored tiles hold for: a kind of device, and the versions that compile for it."""

    device: str
    jax: str
    jaxlib: str


@dataclass(frozen=True)
class Found:
    """What was measured for one shape. `choice`: None where no candidate beat the rule.

    rows: the numbers of rows it was measured with; rule_us, best_us: microseconds a layer for each of them. date: of the measurement.
    """

    key: Key
    choice: Choice | None
    rows: tuple[int, ...]
    rule_us: tuple[float, ...]
    best_us: tuple[float, ...]
    date: str

    def to_json(self) -> dict[str, Any]:
        kernel, choice = self.key.kernel, self.choice
        return {
            "kernel": kernel,
            "shape": self.key.named(),
            "choice": None if choice is None else dict(zip(CHOICES[kernel], choice, strict=True)),
            "rows": list(self.rows),
            "rule_us": list(self.rule_us),
            "best_us": list(self.best_us),
            "date": self.date,
        }


@dataclass(frozen=True)
class Stored:
    """What the kernels take. `found`: of the file, by shape. `path`: the file. `left_out`: why it is not used, where one was found."""

    found: Mapping[Key, Found] = field(default_factory=dict)
    path: Path | None = None
    left_out: str | None = None

    @functools.cached_property
    def choices(self) -> dict[Key, Choice]:
        """Those that are not the rule."""
        return {key: found.choice for key, found in self.found.items() if found.choice is not None}


def here() -> Here | None:
    """None where no kernel of ours runs, or where a program is traced for a device that is not here."""
    if select.no_pallas() is not None or select.compiled_elsewhere():
        return None
    return Here(jax.devices()[0].device_kind, jax.__version__, version("jaxlib"))


def stored_path(device: str) -> Path:
    """Where the tiles of this kind of device are kept."""
    return cache_folder() / "tiles" / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def stored() -> Stored:
    """What the kernels traced here take. Raises ConfigError where EAGLEJAX_TILES names a file that does not fit."""
    asked, now = os.environ.get(VARIABLE) or "auto", here()
    if now is None or asked == "rule" or (asked == "auto" and jax.process_count() > 1):
        return Stored()
    return _once(Path(asked).expanduser() if asked != "auto" else stored_path(now.device), now, asked != "auto")


@functools.cache
def _once(path: Path, now: Here, named: bool) -> Stored:
    if not named and not path.exists():
        return Stored()
    try:
        return Stored(read(path, now), path)
    except ConfigError as error:
        if named:
            raise
        return Stored(path=path, left_out=str(error))


def read(path: Path, now: Here) -> dict[Key, Found]:
    """What a file holds. Raises ConfigError: it cannot be read, is none of ours, or is of another device or version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fix = f"{VARIABLE} is auto, rule or a file of tiles"
        raise ConfigError("tiles cannot be read", where=path, found=error.strerror, fix=fix) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("not a file of tiles", where=path, found=str(error)[:120], fix=FIX) from None
    kept = values.get("version") if isinstance(values, dict) else None
    if kept != VERSION or isinstance(kept, bool):
        raise ConfigError("not tiles of this version", where=path, found=repr(kept)[:40], expected=VERSION, fix=FIX)
    for name in ("device", "jax", "jaxlib"):
        if values.get(name) != getattr(now, name):
            raise ConfigError(
                f"tiles of another {'device' if name == 'device' else f'version of {name}'}",
                where=path,
                found=repr(values.get(name))[:60],
                expected=getattr(now, name),
                fix=FIX,
            )
    try:
        found = [_found(entry) for entry in values["tiles"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("not a file of tiles", where=path, found=str(error)[:120], fix=FIX) from None
    return {one.key: one for one in found}


def _found(entry: Any) -> Found:
    """Raises KeyError, TypeError or ValueError for what `Found.to_json` does not write, and for a choice that is not legal."""
    kernel, named = entry["kernel"], entry["shape"]
    if kernel not in SHAPES:
        raise ValueError(f"no such kernel, {kernel!r:.40}")
    shape = tuple(_number(value, name, int) for name, value in named.items())
    if tuple(named) != SHAPES[kernel][: len(named)] or not whole(kernel, shape):
        raise ValueError(f"no shape of {kernel}: {named!r:.80}")
    key, choice = Key(kernel, shape), entry["choice"]
    if choice is not None:
        if tuple(choice) != CHOICES[kernel] or tuple(choice.values()) not in candidates(key):
            raise ValueError(f"no choice for {key}: {choice!r:.80}")
        choice = tuple(choice.values())
    rows = tuple(_number(value, "rows", int) for value in entry["rows"])
    rule, best = (tuple(_number(value, name, (int, float)) for value in entry[name]) for name in ("rule_us", "best_us"))
    if not isinstance(entry["date"], str) or {len(rule), len(best)} != {len(rows)}:
        raise ValueError(f"rows, times or date of {key}")
    return Found(key, choice, rows, rule, best, entry["date"])


def _number(value: Any, name: str, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: {value!r:.40} is no number")
    return value


def write(path: Path, now: Here, found: Mapping[Key, Found]) -> None:
    """Adds to what the file holds, where that fits; written aside and renamed. Raises ConfigError or CheckpointError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent, "tune_kernels"):
            try:
                before = read(path, now) if path.exists() else {}
            except ConfigError:
                before = {}  # it serves nobody here
            every = sorted({**before, **found}.values(), key=lambda one: one.key)
            head = {"version": VERSION, "device": now.device, "jax": now.jax, "jaxlib": now.jaxlib}
            write_json(path, {**head, "tiles": [one.to_json() for one in every]})
    except OSError as error:
        raise ConfigError("cannot be written", where=path, found=error.strerror) from None


def mark() -> str:
    """For the name of what was measured: whether stored tiles were in use."""
    return ", stored tiles" if stored().choices else ""


def note_tiles(report: LoadReport) -> None:
    """Which tiles the kernels take; a file that was left out is a warning."""
    asked, kept = os.environ.get(VARIABLE) or "auto", stored()
    if kept.left_out is not None:
        report.warn(f"stored tiles are not used, the kernels' rules are: {kept.left_out}")
    if here() is None:
        if asked not in ("auto", "rule"):
            report.note("kernels", f"tiles: {VARIABLE}={asked} is not used: {select.no_pallas()}")
        return
    if kept.found:
        days = sorted({one.date for one in kept.found.values()})
        count = f"{len(kept.choices)} of {len(kept.found)} measured shapes ({', '.join(days)})"
        report.note("kernels", f"tiles: stored ones for {count}, by rule for all others: {kept.path}")
    else:
        why = "none that fit are stored; eaglejax tune_kernels measures them"
        if asked == "rule":
            why = f"{VARIABLE}=rule"
        elif asked == "auto" and jax.process_count() > 1:
            why = f"several processes; {VARIABLE} may name a file that all of them read"
        report.note("kernels", f"tiles: by rule ({why})")
