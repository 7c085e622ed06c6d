"""Every plausible way to wire a draft to its target, each as the override with which the loader reads it so.

A wiring is a set of changes to the one that was loaded. The loader itself says which of them the draft's weights allow: what it refuses
is left out, so that a wiring that was measured is exactly the one that its override gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eaglejax.checkpoint.draft_loader import DraftPlan, facts_of, inspect_draft
from eaglejax.checkpoint.json_file import read_config
from eaglejax.errors import EagleJaxError
from eaglejax.load_report import LoadReport
from eaglejax.loading import DraftOrigin, Pair
from eaglejax.models.config import RopeConfig

FLAGS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
COMMON_THETA = 10000.0  # what readers fall back to, and what SafeAILab's drafts are trained with


@dataclass(frozen=True)
class Change:
    """One thing wired otherwise.

    kind: what it is about ("capture", "norms", "rope", "vocabulary"); two changes of one kind exclude each other.
    name: the change in words. capture: boundaries, where it is about them. keys: config keys to replace.
    """

    kind: str
    name: str
    capture: tuple[int, ...] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wiring:
    """A draft as the loader reads it under some changes; none is the wiring that was loaded."""

    changes: tuple[Change, ...]
    plan: DraftPlan
    overrides: Mapping[str, Any]
    own: Mapping[str, Any]  # overrides that were there before

    @property
    def name(self) -> str:
        """In words: "as loaded", or what is changed."""
        return " and ".join(change.name for change in self.changes) or "as loaded"

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The residual streams it reads."""
        return self.plan.capture.boundaries

    @property
    def keyword(self) -> str:
        """The keyword arguments of `from_pretrained` that load the draft so."""
        parts = [f"capture={self.boundaries}"] if self._captures else []
        parts += [f"draft_config={dict(self.overrides)}"] if self._configures else []
        return ", ".join(parts)

    @property
    def flags(self) -> str:
        """The runner's flags that do."""
        parts = [f"--capture={','.join(map(str, self.boundaries))}"] if self._captures else []
        parts += [f"--draft_config='{json.dumps(dict(self.overrides))}'"] if self._configures else []
        return " ".join(parts)

    @property
    def _captures(self) -> bool:
        return any(change.capture is not None for change in self.changes)

    @property
    def _configures(self) -> bool:
        return any(change.keys for change in self.changes)


class Wirings:
    """The wirings of one loaded pair."""

    def __init__(self, pair: Pair):
        assert pair.origin is not None and pair.draft is not None and pair.capture is not None
        self._origin: DraftOrigin = pair.origin
        self._facts = facts_of(pair.target.config)
        self._target_rope = pair.target.config.layers[0].attention.rope
        self._boundaries = pair.capture.boundaries
        self._aux = pair.draft.config.target_norm_eps is None
        reader = pair.origin.plan.reader
        stored = reader.hf_config if reader.hf_config is not None else read_config(pair.origin.source.folder)
        self._stored: Mapping[str, Any] = stored
        plan = replace(pair.origin.plan, capture=pair.capture)
        self.loaded = Wiring((), plan, self._origin.overrides, self._origin.overrides)

    def apply(self, *changes: Change) -> Wiring | None:
        """The wiring with these changes, or None where the loader refuses it."""
        if not changes:
            return self.loaded
        keys = {key: value for change in changes for key, value in change.keys.items()}
        captures = [change.capture for change in changes if change.capture is not None]
        overrides = {**self._origin.overrides, **keys}
        plan = self._read(captures[-1] if captures else self._boundaries, overrides)
        return None if plan is None else Wiring(changes, plan, overrides, self._origin.overrides)

    def singles(self, kinds: Iterable[str] = ("capture", "vocabulary", "norms", "rope")) -> list[Wiring]:
        """The wirings one change away that the loader takes, each different from the loaded one and from the others."""
        makers = {"capture": self._captures, "vocabulary": self._maps, "norms": self._norms, "rope": self._ropes}
        found: list[Wiring] = []
        seen = {_identity(self.loaded)}
        for kind in kinds:
            for change in makers[kind]():
                wiring = self.apply(change)
                if wiring is not None and _identity(wiring) not in seen:
                    seen.add(_identity(wiring))
                    found.append(wiring)
        return found

    def readings(self) -> dict[str, tuple[int, ...]]:
        """The boundaries that the draft's own config may mean, by reading: "output", "input", or neither but the default."""
        found = {}
        for name in ("input", "output"):
            plan = self._read(name, self._origin.overrides)
            if plan is not None:
                found[name] = plan.capture.boundaries
        return found

    def _read(self, capture: Any, overrides: Mapping[str, Any]) -> DraftPlan | None:
        quiet = LoadReport(quiet=True)
        # a draft of the last state alone takes no capture= at all
        capture = capture if self._aux else "auto"
        try:
            return inspect_draft(
                self._origin.source, target=self._facts, capture=capture, overrides=overrides, report=quiet
            )
        except EagleJaxError:
            return None

    def _captures(self) -> Iterator[Change]:
        if not self._aux:
            return
        own, blocks = self._boundaries, self._facts.layers or 0
        make = lambda name, ids: Change("capture", f"boundaries {tuple(ids)} ({name})", tuple(ids))
        for name, ids in self.readings().items():
            yield make(f"the config's ids as layer {name}s", ids)
        if len(own) == 3 and blocks >= 7:
            yield make("the reference's default", (2, blocks // 2, blocks - 3))
        yield make("each one block later", [b + 1 for b in own])
        yield make("each one block earlier", [b - 1 for b in own])
        if own[0] != 0:
            yield make("the embedding in place of the first", (0, *own[1:]))
        else:
            yield make("boundary 1 in place of the embedding", (1, *own[1:]))
            yield make("boundary 2 in place of the embedding", (2, *own[1:]))
        yield make("the last block's output in place of the last", (*own[:-1], blocks))
        yield make("joined in the opposite order", own[::-1])

    def _maps(self) -> Iterator[Change]:
        for meaning, words in (("ids", "holds target ids"), ("offsets", "holds offsets")):
            yield Change("vocabulary", f"d2t {words}", keys={"d2t": meaning})

    def _norms(self) -> Iterator[Change]:
        config = self._origin.plan.config
        for flag in FLAGS:
            value = not getattr(config, flag)
            yield Change("norms", f"{flag} {str(value).lower()}", keys={flag: value})

    def _ropes(self) -> Iterator[Change]:
        rope, target = self._origin.plan.config.layers[0].attention.rope, self._target_rope
        thetas = {target.theta: "the target's", COMMON_THETA: "the usual default"}
        stored = self._stored_rope()
        if stored is not None:
            thetas.setdefault(stored.theta, "the config's own")
        for theta, whose in thetas.items():
            if theta != rope.theta:
                yield Change("rope", f"rope_theta {theta:g} ({whose})", keys=self._theta(theta))
        if rope.kind != "default":
            none = {"rope_scaling": None, "rope_parameters": None, "rope_theta": rope.theta}
            yield Change("rope", "no RoPE scaling", keys=none)
        elif target.kind != "default":
            keys = {"rope_scaling": _scaling(target), "rope_parameters": None, "rope_theta": rope.theta}
            yield Change("rope", f"the target's RoPE scaling ({target.kind})", keys=keys)
        other = "halves" if rope.interleaved else "interleaved"
        yield Change("rope", f"rotary channels as {other}", keys={"rope_pairing": other})

    def _stored_rope(self) -> RopeConfig | None:
        """The rope of the file's own config, without any override."""
        plan = self._read(self._boundaries, {})
        return None if plan is None else plan.config.layers[0].attention.rope

    def _theta(self, theta: float) -> dict[str, Any]:
        """The keys that set the base, in every place where the config has it."""
        now = {**self._stored, **(self._stored.get("transformer_layer_config") or {}), **self._origin.overrides}
        keys: dict[str, Any] = {"rope_theta": theta}
        for place in ("rope_parameters", "rope_scaling"):
            values = now.get(place)
            if isinstance(values, dict) and "rope_theta" in values:
                keys[place] = {**values, "rope_theta": theta}
        return keys


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    """A scaled RoPE in the words of a config.json."""
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    values |= {name: getattr(rope, name) for name in names.get(rope.kind, ())}
    if rope.original_max_position:
        values["original_max_position_embeddings"] = rope.original_max_position
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if getattr(rope, name) is not None:
            values[name] = getattr(rope, name)
    return values


def _identity(wiring: Wiring) -> tuple[Any, ...]:
    """What makes two wirings the same network."""
    plan = wiring.plan
    return replace(plan.config, boundaries=()), plan.capture.boundaries, plan.target_ids.tobytes()
