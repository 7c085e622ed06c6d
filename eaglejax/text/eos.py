"""Which ids end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.json_file import read_generation_config
from eaglejax.errors import ConfigError
from eaglejax.text.interface import Tokenizer


def read_eos_ids(folder: Path | None, config: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """The EOS ids of a checkpoint: generation_config.json's `eos_token_id` (one or a list) over config.json's (the
    nested text config's for multimodal models), over the tokenizer's own. Empty where none says anything.

    Arguments:
        folder: holds generation_config.json, or None.
        config: config.json.

    Raises ConfigError for anything but whole numbers from 0.
    """
    places: list[tuple[str, Any]] = []
    if folder is not None:
        places.append((f"{folder}/generation_config.json", read_generation_config(folder).get("eos_token_id")))
    places.append(("config.json", config.get("eos_token_id")))
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        places.append(("config.json: text_config", nested.get("eos_token_id")))
    if tokenizer is not None:
        places.append((str(tokenizer.where), tokenizer.eos_token_id))
    for where, value in places:
        if value is not None and value != []:
            return _ids(value, f"{where}: eos_token_id")
    return ()


def _ids(value: Any, where: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31:
            raise ConfigError(
                "not a token id", where=where, found=repr(item), expected="whole numbers from 0, one or a list"
            )
    return tuple(dict.fromkeys(values))
