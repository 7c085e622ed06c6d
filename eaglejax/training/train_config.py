"""A training run written down: the keys of its TOML file and flags, checked before anything is loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eaglejax.config import Speculation
from eaglejax.errors import ConfigError
from eaglejax.run_config import read_toml
from eaglejax.sharding.mesh import DATA, mesh_sizes

PATHS = ("data", "held_out", "model", "start")  # what lies there is told by digests, and may be moved
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[int, ...]": "whole numbers such as 2,15,27",
    "tuple[str, ...]": "names such as a.jsonl,b.jsonl",
}
# keys that may change between a stop and its resume: they change no weight and no acceptance, another mesh only their rounding
FREE = ("out", "keep", "save_every", "evaluate_every", "patience", "slots", "mesh")
# keys younger than some checkpoints: at these values they bind nothing, as when they were not there
YOUNGER = {"optimiser": "adamw", "int8": False}


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run is made of.

    Data: `model` the target; `data` JSONL files (`conversations.py`); `held_out` a JSONL file of prompts for the
        evaluation, else some of the data's are set aside; `regenerate`: the target answers the prompts first, at
        `temperature`, up to `answer_tokens`.
    Draft: `start` a draft's folder to go on from; else `head` ("own", the default, or "target": borrowed), `mlp` (default: four
        times the width), `vocab` (default: 32,000, or the target's), `boundaries` (default 2, L // 2, L - 3).
    Step: rows of `row_length` tokens, `batch` of them at a time, `accumulate` times, for `steps` optimiser steps; `rate`
        the peak rate, `warmup` the share of steps in which it rises; `unroll`, `decay`, `clip`, `objective`, `optimiser`, `int8`
        (`TrainSettings`); `dtype` of target and compute.
    Run: `seed`; a checkpoint every `save_every` steps, the last `keep` of them kept; every `evaluate_every` steps
        `evaluate_prompts` held-out prompts answered by the engine with `tree`, `evaluate_tokens` each, in `slots`;
        `patience`: evaluations without a new best after which the run stops (0: never).
    Devices: `mesh`, such as "data=2,model=4": the target is split over model, the rows of a batch over data.
    """

    out: str
    data: tuple[str, ...] = ()
    model: str = "smollm2"
    held_out: str | None = None
    regenerate: bool = False
    temperature: float = 0.0
    answer_tokens: int = 256
    start: str | None = None
    head: str | None = None
    mlp: int | None = None
    vocab: int | None = None
    boundaries: tuple[int, ...] | None = None
    row_length: int = 2048
    batch: int = 4
    accumulate: int = 1
    steps: int = 1000
    rate: float = 1e-4
    warmup: float = 0.015
    unroll: int = 7
    decay: float = 0.8
    clip: float = 0.5
    objective: str = "entropy"
    optimiser: str = "adamw"
    int8: bool = False
    dtype: str = "bfloat16"
    seed: int = 0
    save_every: int = 200
    keep: int = 2
    evaluate_every: int = 200
    evaluate_prompts: int = 16
    evaluate_tokens: int = 128
    tree: tuple[int, ...] = (7, 1, 8)
    patience: int = 0
    slots: int = 8
    mesh: str | None = None

    def __post_init__(self):
        """Raises ConfigError naming the key."""
        for name in ("answer_tokens", "batch", "accumulate", "steps", "unroll", "save_every", "keep", "slots"):
            self._least(name, 1)
        for name in ("evaluate_every", "evaluate_prompts", "mlp", "vocab"):
            self._least(name, 1)
        self._least("evaluate_tokens", 2)  # the first is the prefill's: a single one says nothing about a draft
        for name in ("seed", "patience", "temperature", "warmup"):
            self._least(name, 0)
        self._least("row_length", 4)
        for name in ("rate", "decay", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError("out of range", where=name, found=getattr(self, name), expected="above 0")
        data = 1 if self.mesh is None else mesh_sizes(self.mesh)[DATA]
        if self.batch % data:
            raise ConfigError(
                "the rows of a batch do not divide over the data axis of the mesh",
                where="batch",
                found=f"{self.batch} rows on {self.mesh}",
                expected=f"a multiple of {data}",
                fix="another batch, or a mesh with fewer devices along data",
            )
        if self.warmup >= 1:
            raise ConfigError("out of range", where="warmup", found=self.warmup, expected="0 <= warmup < 1")
        choices: dict[str, tuple[str, ...]] = {"head": ("own", "target"), "dtype": ("bfloat16", "float32")}
        choices |= {"optimiser": ("adamw", "muon"), "objective": ("entropy", "acceptance", "reached")}
        for name, known in choices.items():
            if getattr(self, name) not in (known if name != "head" else (*known, None)):
                raise ConfigError("unknown", where=name, found=getattr(self, name), expected=" or ".join(known))
        if self.boundaries is not None and not self.boundaries:
            raise ConfigError("empty", where="boundaries", expected="whole numbers such as 2,15,27", fix="leave it out")
        if not self.data:
            raise ConfigError("no training text", where="data", expected="one JSONL file or more")
        if len(self.tree) != 3:
            raise ConfigError(
                "not a tree", where="tree", found=list(self.tree), expected="num_steps, topk, num_draft_tokens"
            )
        self.speculation  # noqa: B018  refuses an impossible tree now

    @property
    def speculation(self) -> Speculation:
        """The tree of the evaluation."""
        num_steps, topk, num_draft_tokens = self.tree
        return Speculation(num_steps, topk, num_draft_tokens)

    def _least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ConfigError("out of range", where=name, found=value, expected=f"{least} or more")

    def binding(self) -> dict[str, Any]:
        """The keys that a resumed run must share, as JSON holds them."""
        values = {name: value for name, value in asdict(self).items() if name not in (*FREE, *PATHS)}
        values["head"] = self.head or "own"
        values = {name: value for name, value in values.items() if name not in YOUNGER or value != YOUNGER[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_file(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file; they stand at its top, without sections. Raises ConfigError naming file and key."""
    values = read_toml(path)
    known = [f.name for f in fields(TrainConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {near[0]}?" if near else None
            raise ConfigError("unknown key", where=path, found=key, expected=f"one of {', '.join(known)}", fix=fix)
    return values


def build(values: Mapping[str, Any], label: Callable[[str], str]) -> TrainConfig:
    """The run of these keys; numbers may be text, as flags have them. `label` names a key's place in errors.

    Raises ConfigError.
    """
    kinds = {f.name: str(f.type) for f in fields(TrainConfig)}
    made: dict[str, Any] = {}
    for name, value in values.items():
        try:
            made[name] = _converted(kinds[name], value)
        except (TypeError, ValueError):
            raise ConfigError(
                "unusable", where=label(name), found=repr(value), expected=WORDS[kinds[name].removesuffix(" | None")]
            ) from None
    if "out" not in made:
        raise ConfigError("the run needs a folder of its own", where=label("out"))
    try:
        return TrainConfig(**made)
    except ConfigError as error:
        if error.where in kinds:
            where = label(str(error.where))
            raise ConfigError(
                error.what, where=where, found=error.found, expected=error.expected, fix=error.fix
            ) from None
        raise


def _converted(kind: str, value: Any) -> Any:
    kind = kind.removesuffix(" | None")
    if value is None:
        return None
    if kind == "bool":
        if not isinstance(value, bool):
            raise TypeError
        return value
    if kind == "str":
        if not isinstance(value, str):
            raise TypeError
        return value
    if kind.startswith("tuple"):
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(int(part) if "int" in kind else str(part) for part in parts)
    if isinstance(value, bool):
        raise TypeError
    if kind == "int" and isinstance(value, int | str):
        try:
            return int(value)  # a float would round a large seed
        except ValueError:
            pass  # 1e3 is a whole number too
    number = float(value)
    if not math.isfinite(number) or (kind == "int" and number != int(number)):
        raise ValueError
    return int(number) if kind == "int" else number
