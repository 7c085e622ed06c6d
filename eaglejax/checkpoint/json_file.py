"""JSON files of a checkpoint folder: config.json, generation_config.json, the index of shards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.pointer import FETCH_AGAIN, refuse_pointer
from eaglejax.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; a CheckpointError where it is missing, cut, not UTF-8, not JSON or not an object."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError as e:
        raise CheckpointError("no such file", where=file, fix="download it, or give the folder that holds it") from e
    except OSError as e:
        raise CheckpointError(f"cannot be read: {e.strerror or e}", where=file) from e
    refuse_pointer(file, raw[:512])
    try:
        # a byte order mark, as some editors write it, is no part of the text
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise CheckpointError(
            f"is not UTF-8 text (byte {e.start})", where=file, expected="JSON in UTF-8", fix=FETCH_AGAIN
        ) from e
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        # it stopped within the last string, number or word of the text, or where one more was due
        cut = e.msg.startswith("Unterminated") or (
            e.msg != "Extra data" and not re.search(r"[\s,:{}\[\]]", text[e.pos :].rstrip())
        )
        what = f"is cut off after {len(raw)} bytes" if cut else "is not valid JSON"
        raise CheckpointError(f"{what} ({e.msg}, line {e.lineno} column {e.colno})", where=file, fix=FETCH_AGAIN) from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"is not valid JSON ({e})", where=file, fix=FETCH_AGAIN) from e
    if not isinstance(value, dict):
        raise CheckpointError("holds no JSON object", where=file, found=type(value).__name__, expected="{...}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    if not folder.is_dir():
        raise CheckpointError("no such folder", where=folder, fix="give the folder that holds config.json")
    return read_json(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint folder, or an empty dict where there is none, as is common."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def read_index(file: Path) -> dict[str, str]:
    """weight_map of an index of shards: the name of each tensor and of the file beside the index that holds it."""
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map", where=file, found=type(weight_map).__name__, fix=FETCH_AGAIN)
    for name, shard in weight_map.items():
        # a path that leads elsewhere is no shard of this checkpoint
        if not isinstance(shard, str) or not shard or Path(shard).name != shard or shard == "..":
            raise CheckpointError(
                f"weight_map names no file beside it for {name!r}",
                where=file,
                found=repr(shard),
                expected="a file name",
            )
    return weight_map
