"""The file of a target's answers: a header that says what they were made with, then an answer a line, each checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.durable import replace_file
from eaglejax.errors import ConfigError, PromptError
from eaglejax.training.identity import check_same_run
from eaglejax.training.lines import HEADER


def resume(file: Path, header: dict[str, Any], prompts: Sequence[Sequence[int]]) -> int:
    """How many answers the file holds; a line that was cut by a kill is taken off. Begins the file where it is new.

    Raises ConfigError where it holds the answers of another run, PromptError where a line of it is no answer to its
    prompt; the file then stays as it is.
    """
    raw = file.read_bytes() if file.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    first = json.dumps(header).encode() + b"\n"
    if not lines:
        if not first.startswith(raw):
            raise _damaged(file, 1, raw, "the header of a file of answers")
        replace_file(file, first)
        return 0
    found = _object(lines[0])
    if found is None or HEADER not in found:
        raise _damaged(file, 1, lines[0], "the header of a file of answers")
    if "row_length" not in found:
        raise ConfigError(
            "does not say for which row_length its answers were made, which cuts them",
            where=file,
            expected=header.get("row_length"),
            fix=f'remove it, or add "row_length" to its first line if you know that it was {header.get("row_length")}',
        )
    check_same_run(found, header, file)
    for number, line in enumerate(lines[1:]):
        row = _object(line)
        if row is None or number >= len(prompts) or not _answers(row, number, prompts[number]):
            raise _damaged(file, number + 2, line, f"answer {number} of {len(prompts)}, to its prompt")
    if len(whole) < len(raw):
        with open(file, "r+b") as out:
            out.truncate(len(whole))
    return len(lines) - 1


def cut_by_row(file: Path, new_tokens: int) -> int:
    """How many answers ended where the row did, short of the tokens that were asked for."""
    rows = [json.loads(line) for line in file.read_bytes().splitlines()[1:]]
    return sum(row.get("finish_reason") == "length" and len(row["token_ids"]) < new_tokens for row in rows)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _answers(row: dict[str, Any], number: int, prompt: Sequence[int]) -> bool:
    ids = row.get("token_ids")
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    return whole and row.get("n") == number and row.get("prompt_ids") == list(prompt)


def _damaged(file: Path, number: int, line: bytes, expected: str) -> PromptError:
    return PromptError(
        "is damaged",
        where=f"{file}, line {number}",
        found=repr(line[:80].decode(errors="replace")),
        expected=expected,
        fix=f"remove {file} to have all prompts answered anew, or this line and those after it",
    )
