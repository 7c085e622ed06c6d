"""Lines of JSONL text, each known by its kind, and refused with its file and number where it is none (`conversations`)."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import PromptError
from eaglejax.text.chat import parse_messages

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
HEADER = "eaglejax_answers"  # key of the first line of a file of regenerated answers
KINDS = ("messages", "conversations", "prompt_ids", "prompt", "turns")
SPOKEN = ("system", "developer", "user", "assistant", "tool", "function")  # roles that templates know


def read_lines(files: Sequence[str | Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of every line that is not blank. Raises PromptError for what is no such file."""
    for file in files:
        try:
            raw = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise PromptError(
                "cannot be read", where=file, found=error.strerror, expected="a JSONL file", fix="check its name"
            ) from None
        rows = 0
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line.strip():
                continue
            row = _object(line, f"{file}, line {number}")
            if HEADER not in row:
                rows += 1
                yield f"{file}, line {number}", row
        if not rows:
            raise PromptError(
                "holds a header and no answer" if raw.strip() else "is empty",
                where=file,
                expected="one JSON object a line",
                fix=f"give lines with one of {', '.join(KINDS)}",
            )


def _object(line: bytes, where: str) -> dict[str, Any]:
    fix = "correct the line, or take it out"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x} at {error.start}"
        raise PromptError(
            "is not UTF-8", where=where, found=found, expected="UTF-8 text", fix="save the file as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PromptError("is not JSON", where=where, found=str(error), expected="one JSON object", fix=fix) from None
    if not isinstance(row, dict):
        found = line.decode()[:80]
        raise PromptError("is not an object", where=where, found=found, expected='such as {"prompt": "..."}', fix=fix)
    return row


def kind_of(row: dict[str, Any], where: str) -> str:
    kinds = [name for name in KINDS if row.get(name)]
    if len(kinds) == 1:
        return kinds[0]
    there = [name for name in KINDS if name in row]
    expected, fix = f"one of {', '.join(KINDS)}", "correct the line, or take it out"
    if not kinds and there:
        where, what, found = f"{where}: {there[0]}", "is empty", repr(row[there[0]])
    elif not kinds and "token_ids" in row:
        what, found, expected = "an answer without its prompt", "token_ids", "prompt_ids beside token_ids"
        fix = "add prompt_ids, the tokens of the prompt"
    else:
        what = "holds more than one kind of text" if kinds else "holds no training text"
        found = ", ".join(kinds or map(str, row)) or "no key"
    raise PromptError(what, where=where, found=found, expected=expected, fix=fix)


def prompt_text(value: Any, kind: str, where: str) -> str:
    """The text of `prompt`, or the first of `turns`."""
    if kind == "turns" and not (isinstance(value, list) and all(isinstance(turn, str) for turn in value)):
        raise PromptError(
            "turns are a list of texts",
            where=where,
            found=repr(value)[:80],
            expected='such as ["..."]',
            fix="write the turns as a list, or a single text as prompt",
        )
    text = value[0] if kind == "turns" else value
    if not isinstance(text, str):
        raise PromptError(
            "a prompt is text",
            where=where,
            found=repr(text)[:80],
            expected="text",
            fix="for messages there is messages",
        )
    if not text.strip():
        raise PromptError(
            "is blank", where=where, found=repr(text[:20]), expected="text to answer", fix="take the line out"
        )
    _refuse_nul(text, where)
    return text


def _refuse_nul(text: str, where: str) -> None:
    if "\0" in text:
        raise PromptError(
            "holds a NUL character",
            where=where,
            found=f"at character {text.index(chr(0))}",
            expected="plain text",
            fix="take it out: the file may be damaged, or no text",
        )


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    fix = "correct the line, or take it out"
    if isinstance(value, list) and all(isinstance(m, dict) and "from" in m for m in value):
        value = [{"role": ROLES.get(str(m["from"]), str(m["from"])), "content": m.get("value")} for m in value]
    try:
        messages = parse_messages(value, where)
    except PromptError as error:
        raise PromptError(
            error.what, where=error.where, found=error.found, expected=error.expected, fix=error.fix or fix
        ) from None
    for n, message in enumerate(messages):
        if message["role"] not in SPOKEN:
            raise PromptError(
                "an unknown role: a template would pass it over, or take it for another",
                where=f"{where}[{n}]",
                found=repr(message["role"]),
                expected=", ".join(SPOKEN) + "; with from also human and gpt",
                fix="rename the role, or take the line out",
            )
        _refuse_nul(message["content"], f"{where}[{n}]")
    return messages
