"""From flags and a TOML file to the settings of a run."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import GROUPS, UsageError, given
from eaglejax.errors import ConfigError
from eaglejax.run_config import KEYS, RunConfig, Tables, read_tables

log = logging.getLogger("eaglejax")

# flag -> section and key of the TOML file; flags are called like the keys, but for one
_KEYS: dict[str, tuple[str, str]] = {
    **{name: ("model", name) for name in ("model", "draft", "capture", "draft_config")},
    **{name: ("engine", name) for name in KEYS["engine"]},
    "speculation": ("speculation", "mode"),
    **{name: ("speculation", name) for name in ("num_steps", "topk", "num_draft_tokens")},
    **{flag.name: ("sampling", flag.name) for flag in GROUPS["sampling"]},
}
_FLAGS = {place: name for name, place in _KEYS.items()}
_WORDS_OF_TUNING = ("auto", "none", "measure")
_NONE_MEANS_NONE = ("draft", "speculation", "tuning")


def read_settings(flags: FlagValues, *, own: Collection[str] = ()) -> RunConfig:
    """The settings of this command line. Flags win over the file, key by key.

    Arguments:
        own: flags of these names mean something else to this command, which reads them itself.

    Raises:
        UsageError: a flag's value is impossible. ConfigError: the file's is.
    """
    path = given(flags, "config")
    tables = read_tables(path) if path is not None else {}
    chosen = {name: value for name in _KEYS if name not in own and (value := _value(flags, name)) is not None}
    _overlay(tables, chosen)

    def label(section: str, key: str) -> str:
        name = _FLAGS.get((section, key))
        if name in chosen or path is None or key not in tables.get(section, {}):
            return f"--{name or key}"
        return f"{path}: [{section}] {key}"

    try:
        settings = RunConfig.from_tables(tables, label)
    except ConfigError as error:
        if str(error.where).startswith("--"):
            raise UsageError(str(error)) from None
        raise
    if "tuning" in flags:  # commands without it read none
        _check_tuning(settings, label("engine", "tuning"))
    return settings


def _check_tuning(settings: RunConfig, where: str) -> None:
    """Refuse a tuning that is not there, and tell where none will be read. Raises ConfigError."""
    asked = settings.tuning
    if asked in _WORDS_OF_TUNING[:2]:
        return
    if asked not in _WORDS_OF_TUNING and not Path(asked).is_file():
        near = difflib.get_close_matches(asked.lower(), _WORDS_OF_TUNING, n=1)
        raise ConfigError(
            "no such file",
            where=where,
            found=repr(asked),
            expected=f"{', '.join(_WORDS_OF_TUNING)}, or a file that eaglejax tune --out wrote",
            fix=f"did you mean {near[0]}?" if near else None,
        )
    if settings.draft is None or settings.speculation != "auto":
        log.warning("%s: not used: only --speculation=auto with a draft chooses by a tuning; found %s", where, asked)


def _value(flags: FlagValues, name: str) -> Any:
    if name in _NONE_MEANS_NONE:
        value = flags[name].value if name in flags else None
        return value.lower() if value is not None and value.lower() == "none" else value
    value = given(flags, name)
    if name == "stop_token_ids" and value is not None:
        return token_ids(name, value)
    if name == "draft_config" and value is not None:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise UsageError(
                f'--{name}: not JSON; found {value[:80]!r}; expected such as {{"rope_theta": 10000.0}}'
            ) from None
    return value


def _overlay(tables: Tables, chosen: dict[str, Any]) -> None:
    """Put the flags over the file's keys. A tree on the command line replaces the file's mode, and the other way
    round."""
    if "speculation" in chosen:
        tables.pop("speculation", None)
    elif any(_KEYS[name][0] == "speculation" for name in chosen):
        tables.get("speculation", {}).pop("mode", None)
    for name, value in chosen.items():
        section, key = _KEYS[name]
        tables.setdefault(section, {})[key] = value


def token_ids(name: str, text: str) -> list[int]:
    """Whole numbers written as 1,2,3 (brackets and spaces may stand)."""
    try:
        return [int(part) for part in text.strip().strip("[]").split(",")]
    except ValueError:
        raise UsageError(f"--{name}: not token ids; found {text!r}; expected numbers such as 1,2,3") from None
