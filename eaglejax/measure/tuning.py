"""A stored tuning: the trees of "auto", what their cycles cost, how often they are accepted, and the machine and pair it holds for."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from eaglejax.checkpoint.builtin import cache_folder
from eaglejax.config import Auto, Speculation
from eaglejax.errors import ConfigError
from eaglejax.kernels import select, tile_store
from eaglejax.loading import Pair
from eaglejax.measure.cycle_costs import Costs
from eaglejax.measure.environment import usable_cores
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.sharding.layout import fetch
from eaglejax.sharding.mesh import AXES, axis_size
from eaglejax.speculation.adapt import Policy, make_policy

VERSION = 3
FIX = "tune again: eaglejax tune, or engine.tune()"
GREEDY, SAMPLED = "greedy", "sampled"
# names are for people, and costs of another number of slots are measured at their first use
_NEED_NOT_AGREE = ("target", "draft", "slots")


@dataclass(frozen=True)
class HoldsFor:
    """The machine and the pair a tuning was measured with. Names are for people; fingerprints tell configs apart, and weights by their
    vectors (norms, ids).

    slots: of the waves whose costs are stored; acceptance holds for any number. kernels: `select.form`, and whether stored tiles were in
        use. jax: its version, which compiles them.
    """

    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    device: str
    dtype: str
    mesh: str
    draft_placement: str
    slots: int
    kernels: str
    jax: str

    def differences(self, other: HoldsFor) -> list[str]:
        """Where another one is different, in words; names and slots may differ."""
        names = [f.name for f in fields(self) if f.name not in _NEED_NOT_AGREE]
        return [
            f"{name} {getattr(self, name)}, here {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class Acceptance:
    """Of one class of requests. `reach`: for each tree the share of cycles that accept at least 1, 2, .. tokens. `first_guess`: share of
    positions at which the draft's first guess is right."""

    reach: tuple[tuple[float, ...], ...]
    first_guess: float


@dataclass(frozen=True)
class Row:
    """One setting of a class. `tau` and `cycle_ms` are predicted. `predicted`: tokens/s by them; `measured`, `measured_ms`: the same
    and a cycle's milliseconds by running it, None where it was not."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    tau: float
    cycle_ms: float
    predicted: float
    measured: float | None = None
    measured_ms: float | None = None

    @property
    def tree(self) -> Speculation:
        return Speculation(self.num_steps, self.topk, self.num_draft_tokens)


@dataclass(frozen=True)
class Tuning:
    """What `tune` found. `classes`: "greedy" and "sampled", each with acceptance and the best settings, fastest first."""

    holds_for: HoldsFor
    trees: tuple[Speculation, ...]
    window: int
    costs: Costs
    acceptance: dict[str, Acceptance]
    rows: dict[str, tuple[Row, ...]]

    @property
    def auto(self) -> Auto:
        """The choices that this tuning has tables for."""
        return Auto(self.trees, self.window)

    def policy(self, sampled: bool) -> Policy:
        """The tables of a wave; `sampled` where any of its requests draws."""
        found = self.acceptance_of(sampled)
        costs = self.costs
        return make_policy(found.reach, costs.trees, costs.catch_up, costs.look, found.first_guess)

    def acceptance_of(self, sampled: bool) -> Acceptance:
        """Of requests that draw, where they were tuned for; else of greedy ones."""
        return self.acceptance[SAMPLED if sampled and SAMPLED in self.acceptance else GREEDY]

    def to_json(self) -> dict[str, Any]:
        """For the file."""
        shape = lambda tree: [tree.num_steps, tree.topk, tree.nodes]
        return {
            "version": VERSION,
            "holds_for": asdict(self.holds_for),
            "trees": [shape(tree) for tree in self.trees],
            "window": self.window,
            "costs": asdict(self.costs),
            "acceptance": {name: asdict(found) for name, found in self.acceptance.items()},
            "rows": {name: [asdict(row) for row in rows] for name, rows in self.rows.items()},
        }

    @classmethod
    def from_json(cls, stored: Any, where: object) -> Tuning:
        """Raises ConfigError naming `where` for anything that `to_json` does not write."""
        version = stored.get("version") if isinstance(stored, dict) else None
        if version != VERSION:
            raise ConfigError("not a tuning of this version", where=where, found=version, expected=VERSION, fix=FIX)
        try:
            tuning = cls(
                _holds_for(stored["holds_for"]),
                tuple(map(_tree, _list(stored["trees"], "trees"))),
                _whole(stored["window"], "window"),
                _costs(stored["costs"]),
                {name: _acceptance(found, name) for name, found in stored["acceptance"].items()},
                {name: tuple(_row(row) for row in _list(rows, "rows")) for name, rows in stored["rows"].items()},
            )
            _check_together(tuning)
        except KeyError as error:
            raise ConfigError("not a tuning", where=where, found=f"no {error}", fix=FIX) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError("not a tuning", where=where, found=str(error)[:120], fix=FIX) from None
        return tuning

    def save(self, path: Path) -> None:
        """Written aside and renamed: a reader finds the old file or the new one whole. Raises ConfigError where it cannot be written."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = path.resolve()  # a link stays one
            if path.exists() and not path.is_file():
                path.write_text(text)  # a pipe or a terminal cannot be renamed to
                return
            aside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                aside.write_text(text)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError("cannot be written", where=path, found=error.strerror) from None


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name}: {value!r:.40} is no list")
    return value


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r:.40} is no whole number")
    return value


def _real(value: Any, name: str, low: float = 0.0, high: float = math.inf) -> float:
    """A finite number in [low, high]: JSON as Python reads it has NaN and Infinity, and whole numbers beyond any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {value!r:.40} is no number")
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        raise ValueError(f"{name}: {number} is out of range, {low:g} to {high:g}")
    return number


def _tree(stored: Any) -> Speculation:
    steps, topk, nodes = (_whole(value, "trees") for value in _list(stored, "trees"))
    return Speculation(steps, topk, nodes)


def _fields(kind: type, stored: Any) -> dict[str, Any]:
    """The stored fields of a dataclass. Raises TypeError for others, KeyError where one without a default is missing."""
    if not isinstance(stored, dict):
        raise TypeError(f"{kind.__name__}: {stored!r:.40} is no table")
    known = {f.name: f.default for f in fields(kind)}
    if unknown := stored.keys() - known.keys():
        raise TypeError(f"{kind.__name__}: no such field, {min(unknown)!r:.40}")
    return {name: stored[name] if default is MISSING else stored.get(name, default) for name, default in known.items()}


def _holds_for(stored: Any) -> HoldsFor:
    found = _fields(HoldsFor, stored)
    for name, value in found.items():
        if name != "slots" and not isinstance(value, str):
            raise TypeError(f"{name}: {value!r:.40} is no text")
    if _whole(found["slots"], "slots") < 1:
        raise ValueError(f"slots: {found['slots']} is out of range")
    return HoldsFor(**found)


def _costs(stored: Any) -> Costs:
    found = _fields(Costs, stored)
    trees = tuple(_real(cost, "costs of trees") for cost in _list(found.pop("trees"), "costs of trees"))
    numbers = {name: _real(value, name) for name, value in found.items()}
    if not all(trees) or not numbers["plain_ms"]:
        raise ValueError("a cycle that costs nothing")
    return Costs(trees, **numbers)


def _acceptance(stored: Any, name: str) -> Acceptance:
    if name not in (GREEDY, SAMPLED):
        raise ValueError(f"acceptance: no such class, {name!r:.40}")
    found, what = _fields(Acceptance, stored), f"{name}: reach"
    reach = [tuple(_real(share, what, high=1.0) for share in _list(tree, what)) for tree in _list(found["reach"], what)]
    return Acceptance(tuple(reach), _real(found["first_guess"], f"{name}: first_guess", high=1.0))


def _row(stored: Any) -> Row:
    found = _fields(Row, stored)
    _tree([found[name] for name in ("num_steps", "topk", "num_draft_tokens")])
    for name in ("tau", "cycle_ms", "predicted", "measured", "measured_ms"):
        if name not in ("measured", "measured_ms") or found[name] is not None:
            found[name] = _real(found[name], name)
    return Row(**found)


def _check_together(tuning: Tuning) -> None:
    """Raises ValueError where tables do not fit the trees, or a class has none."""
    if GREEDY not in tuning.acceptance:
        raise ValueError("acceptance: no class 'greedy'")
    levels = [tree.num_steps for tree in tuning.trees]
    for name, found in tuning.acceptance.items():
        if [len(shares) for shares in found.reach] != levels:
            raise ValueError(f"{name}: tables do not fit the trees")
    if len(tuning.costs.trees) != len(tuning.trees):
        raise ValueError("costs: tables do not fit the trees")
    if set(tuning.rows) != set(tuning.acceptance) or not all(tuning.rows.values()):
        raise ValueError("rows: not those of the classes")
    _ = tuning.auto  # raises for trees that cannot be chosen among


def read_tuning(path: Path) -> Tuning:
    """Raises ConfigError where the file cannot be read, or holds no tuning."""
    try:
        stored = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("cannot be read", where=path, found=error.strerror, fix=FIX) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("not a tuning", where=path, found=str(error)[:120], fix=FIX) from None
    return Tuning.from_json(stored, path)


def holds_for(pair: Pair, slots: int) -> HoldsFor:
    """What a tuning of this pair, here, with waves of `slots` slots, holds for."""
    assert pair.draft is not None
    device = (jax.devices() if pair.mesh is None else pair.mesh.devices.ravel())[0]
    sharded = pair.draft.split.draft_vocab.axis is not None or any(
        layer.attention.axis or layer.mlp.axis for layer in pair.draft.split.layers
    )
    return HoldsFor(
        target=pair.name,
        target_fingerprint=fingerprint(pair.target),
        draft=pair.draft_name or "",
        draft_fingerprint=fingerprint(pair.draft),
        device=device.device_kind + (f", {usable_cores()} cores" if device.platform == "cpu" else ""),
        dtype=str(pair.dtype),
        mesh=",".join(f"{axis}={axis_size(pair.mesh, axis)}" for axis in AXES),
        draft_placement="sharded" if sharded else "replicated",
        slots=slots,
        kernels=select.form() + tile_store.mark(),
        jax=jax.__version__,
    )


def fingerprint(model: Target | Draft) -> str:
    """Of a model's config, of the names and types of its weights, and of the values of all that are vectors (norms, ids)."""
    digest = hashlib.sha256(repr(model.config).encode())
    for path, value in jax.tree_util.tree_leaves_with_path(nnx.split(model)[1]):
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.ndim}".encode())
        if value.ndim == 1:
            digest.update(np.ascontiguousarray(fetch(value)).tobytes())
    return digest.hexdigest()[:16]


def stored_path(holds: HoldsFor) -> Path:
    """Where the tuning of this pair and machine is kept, in the user's cache folder.

    Whatever the slots, since they need not agree, and jax: so a tuning of before an upgrade is found, told and left out.
    """
    key = [getattr(holds, f.name) for f in fields(holds) if f.name not in (*_NEED_NOT_AGREE, "jax")]
    return cache_folder() / "tunings" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.json"
