"""A run written down: model, tree, sampling and engine settings in one TOML file. Nothing heavy is imported here."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from eaglejax.checkpoint.builtin import builtin_names
from eaglejax.config import Sampling, Speculation, whole_number
from eaglejax.errors import ConfigError, EagleJaxError

Tables = dict[str, dict[str, Any]]
Label = Callable[[str, str], str]

# section -> the keys it takes
KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "draft", "capture", "draft_config"),
    "speculation": ("mode", *(f.name for f in fields(Speculation))),
    "sampling": tuple(f.name for f in fields(Sampling)),
    "engine": ("dtype", "max_len", "slots", "mesh", "draft_placement", "expert_split", "tuning", "check_wiring"),
}
_SWITCHES = {("speculation", "coupled"), ("sampling", "ignore_eos"), ("engine", "check_wiring")}
_TEXTS = {("model", "model"), ("model", "draft"), ("speculation", "mode"), ("engine", "dtype")}
_TEXTS |= {("engine", "mesh"), ("engine", "draft_placement"), ("engine", "expert_split"), ("engine", "tuning")}
DRAFT_PLACEMENTS, EXPERT_SPLITS = ("replicated", "sharded"), ("auto", "experts", "width")
# the draft that a built-in model is used with where none is named, as far as it is shipped
BUILT_IN_DRAFTS = {"smollm2": "smollm2-eagle3", "smollm2-moe": "smollm2-moe-eagle3"}


def built_in_draft(name: str) -> str | None:
    """The draft that belongs to a built-in model, where it is shipped; None for any other name."""
    draft = BUILT_IN_DRAFTS.get(name)
    return draft if draft in builtin_names() else None


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made of but its prompts.

    A file has the sections [model] (model, draft, capture, draft_config), [speculation] (mode = "auto" or "none", or the fields of
    `Speculation`), [sampling] (the fields of `Sampling`) and [engine] (dtype, max_len, slots). Each may be left out.

    Arguments:
        model, draft, capture, draft_config, speculation, dtype, max_len, slots, mesh, draft_placement, expert_split, tuning,
            check_wiring: as in `EagleJaxEngine.from_pretrained`.
        sampling: of every request.
    """

    model: str = "smollm2"
    draft: str | None = None
    capture: str | tuple[int, ...] = "auto"
    draft_config: Mapping[str, Any] | None = None
    speculation: Speculation | Literal["auto"] | None = "auto"
    sampling: Sampling = field(default_factory=Sampling)
    dtype: str = "float32"
    max_len: int = 2048
    slots: int = 4
    mesh: str | None = None
    draft_placement: str = "replicated"
    expert_split: str = "auto"
    tuning: str = "auto"
    check_wiring: bool = True

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """The run in a TOML file.

        Raises ConfigError naming the file, the key, what was found and what was expected.
        """
        return cls.from_tables(read_tables(path), lambda section, key: f"{path}: [{section}] {key}")

    @classmethod
    def from_tables(cls, tables: Tables, label: Label) -> RunConfig:
        """The run that {section: {key: value}} describe; `label` names a key's place in errors."""
        for section, table in tables.items():
            for key, value in table.items():
                _check_kind(section, key, value, label)
        model, engine = tables.get("model", {}), tables.get("engine", {})
        speculation = _speculation(tables.get("speculation", {}), label)
        name = model.get("model", cls.model)
        draft = model.get("draft")
        tree = speculation if isinstance(speculation, Speculation) and speculation.num_steps else None
        if draft is None and (tree or speculation == "auto"):
            draft = built_in_draft(name)
        draft = None if draft == "none" else draft
        if draft is None and tree:
            key = next(iter(tables["speculation"]))
            raise ConfigError(
                "a tree needs a draft, and none is named",
                where=label("speculation", key),
                found=tree.describe(),
                fix="name a draft, or leave the tree out for plain decoding",
            )
        return cls(
            model=name,
            draft=draft,
            capture=_capture(model.get("capture", cls.capture), label),
            draft_config=model.get("draft_config"),
            speculation=speculation,
            sampling=_build(Sampling, "sampling", tables.get("sampling", {}), label),
            dtype=_dtype(engine.get("dtype", cls.dtype), label),
            max_len=_positive("max_len", engine.get("max_len", cls.max_len), label),
            slots=_positive("slots", engine.get("slots", cls.slots), label),
            mesh=engine.get("mesh"),
            draft_placement=_one_of(DRAFT_PLACEMENTS, "draft_placement", engine.get("draft_placement"), label),
            expert_split=_one_of(EXPERT_SPLITS, "expert_split", engine.get("expert_split"), label),
            tuning=engine.get("tuning", cls.tuning),
            check_wiring=engine.get("check_wiring", cls.check_wiring),
        )

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `EagleJaxEngine.from_pretrained`; `sampling` goes to its `generate`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sampling"}


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as it is. Raises ConfigError where it cannot be read, or is none."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError("cannot be read", where=path, found=error.strerror) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("not valid TOML", where=path, found=str(error)) from None


def read_tables(path: str | Path) -> Tables:
    """The sections of a TOML file, its section and key names checked, its values not yet."""
    tables = read_toml(path)
    for section, table in tables.items():
        if section not in KEYS:
            raise _unknown(
                "unknown section" if isinstance(table, dict) else "a key outside of any section", path, section, KEYS
            )
        if not isinstance(table, dict):
            raise ConfigError(
                "must be a section, not a value", where=f"{path}: {section}", found=repr(table), expected=f"[{section}]"
            )
        for key in table:
            if key not in KEYS[section]:
                raise _unknown("unknown key", f"{path}: [{section}]", key, KEYS[section])
    return tables


def _unknown(what: str, where: object, name: str, known: Any) -> ConfigError:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    # a key of another section is the commonest slip
    home = next((section for section, keys in KEYS.items() if name in keys), None)
    fix = f"did you mean {near[0]}?" if near else f"it belongs in [{home}]" if home else None
    return ConfigError(what, where=where, found=name, expected=f"one of {', '.join(known)}", fix=fix)


def _check_kind(section: str, key: str, value: Any, label: Label) -> None:
    if key == "draft_config":
        right, expected = isinstance(value, dict), "keys of the draft's config.json with their values"
    elif (section, key) in _SWITCHES:
        right, expected = isinstance(value, bool), "true or false"
    elif (section, key) in _TEXTS:
        right, expected = isinstance(value, str) and value != "", "non-empty text"
    else:
        right, expected = not isinstance(value, dict), "a value, not a table"
    if not right:
        raise ConfigError("wrong kind of value", where=label(section, key), found=repr(value), expected=expected)


def _build(kind: type, section: str, table: dict[str, Any], label: Label) -> Any:
    """`kind(**table)`, its refusals told with the key's place."""
    try:
        return kind(**table)
    except EagleJaxError as error:
        raise _moved(error, label(section, str(error.where))) from None
    except (TypeError, ValueError):
        keys = ", ".join(label(section, key) for key in table)
        raise ConfigError("a value of the wrong kind", where=keys, found=", ".join(map(repr, table.values()))) from None


def _moved(error: EagleJaxError, where: str) -> ConfigError:
    return ConfigError(error.what, where=where, found=error.found, expected=error.expected, fix=error.fix)


def _speculation(table: dict[str, Any], label: Label) -> Speculation | Literal["auto"] | None:
    tree = {key: value for key, value in table.items() if key != "mode"}
    mode = table.get("mode")
    if mode not in (None, "auto", "none"):
        raise ConfigError(
            "unknown mode", where=label("speculation", "mode"), found=repr(mode), expected='"auto" or "none"'
        )
    if mode is not None and tree:
        raise ConfigError(
            "a mode and a tree exclude each other",
            where=label("speculation", "mode"),
            found=f"{mode!r} beside {', '.join(tree)}",
            fix="leave one of them out",
        )
    if tree:
        return _build(Speculation, "speculation", tree, label)
    return None if mode == "none" else "auto"


def _capture(value: Any, label: Label) -> str | tuple[int, ...]:
    if value in ("auto", "input", "output"):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(whole_number("capture", part, 0) for part in parts)
    except (EagleJaxError, TypeError):
        raise ConfigError(
            "not a reading of captured layers",
            where=label("model", "capture"),
            found=repr(value),
            expected='"auto", "input", "output" or boundaries such as 3,31,59',
        ) from None


def _dtype(value: str, label: Label) -> str:
    if value not in ("float32", "bfloat16"):
        raise ConfigError(
            "not a compute dtype", where=label("engine", "dtype"), found=value, expected="float32 or bfloat16"
        )
    return value


def _one_of(known: tuple[str, ...], key: str, value: str | None, label: Label) -> str:
    """The first of `known` where nothing is given."""
    if value is not None and value not in known:
        raise ConfigError("unknown choice", where=label("engine", key), found=repr(value), expected=" or ".join(known))
    return value or known[0]


def _positive(key: str, value: Any, label: Label) -> int:
    try:
        return whole_number(key, value, 1)
    except EagleJaxError as error:
        raise _moved(error, label("engine", key)) from None
