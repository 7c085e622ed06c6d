"""A stored tuning: the trees of "auto", what their cycles cost, how often they are accepted, and the machine and pair it holds for."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from eaglejax.checkpoint.builtin import cache_folder
from eaglejax.config import Auto, Speculation
from eaglejax.errors import ConfigError
from eaglejax.loading import Pair
from eaglejax.measure.cycle_costs import Costs
from eaglejax.measure.environment import usable_cores
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.sharding.layout import fetch
from eaglejax.sharding.mesh import AXES, axis_size
from eaglejax.speculation.adapt import Policy, make_policy

VERSION = 1
FIX = "tune again: eaglejax tune, or engine.tune()"


@dataclass(frozen=True)
class HoldsFor:
    """The machine and the pair a tuning was measured with. Names are for people; fingerprints tell configs apart, and weights by their
    vectors (norms, ids)."""

    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    device: str
    dtype: str
    mesh: str
    draft_placement: str
    slots: int

    def differences(self, other: HoldsFor) -> list[str]:
        """Where another one is different, in words; names may differ."""
        names = [f.name for f in fields(self) if f.name not in ("target", "draft")]
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
    """One setting of a class. `predicted`: tokens/s by the cost model; `measured`: by running it, None where it was not."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    tau: float
    cycle_ms: float
    predicted: float
    measured: float | None = None

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
        return make_policy(found.reach, self.costs.trees, self.costs.catch_up, found.first_guess)

    def acceptance_of(self, sampled: bool) -> Acceptance:
        """Of requests that draw, where they were tuned for; else of greedy ones."""
        return self.acceptance["sampled" if sampled and "sampled" in self.acceptance else "greedy"]

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
            stored_costs = stored["costs"]
            tuning = cls(
                HoldsFor(**stored["holds_for"]),
                tuple(Speculation(*tree) for tree in stored["trees"]),
                stored["window"],
                Costs(**(stored_costs | {"trees": tuple(map(float, stored_costs["trees"]))})),
                {
                    name: Acceptance(tuple(tuple(map(float, tree)) for tree in found["reach"]), found["first_guess"])
                    for name, found in stored["acceptance"].items()
                },
                {name: tuple(Row(**row) for row in rows) for name, rows in stored["rows"].items()},
            )
            whole = [len(tree) for tree in tuning.acceptance["greedy"].reach] == [t.num_steps for t in tuning.trees]
            costs = tuning.costs
            sound = all(0 < cost < math.inf for cost in costs.trees) and 0 <= costs.catch_up < math.inf
            if not whole or not sound or len(costs.trees) != len(tuning.trees):
                raise ValueError("tables do not fit the trees")
            _ = tuning.auto
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("not a tuning", where=where, found=str(error)[:120], fix=FIX) from None
        return tuning

    def save(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise ConfigError("cannot be written", where=path, found=error.strerror) from None


def read_tuning(path: Path) -> Tuning:
    """Raises ConfigError where the file cannot be read, or holds no tuning."""
    try:
        stored = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("cannot be read", where=path, found=error.strerror, fix=FIX) from None
    except ValueError as error:
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
    """Where the tuning of this pair and machine is kept, in the user's cache folder."""
    key = [getattr(holds, f.name) for f in fields(holds) if f.name not in ("target", "draft")]
    return cache_folder() / "tunings" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.json"
