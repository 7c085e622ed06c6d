"""The prompts of a command line: texts, token ids, chat messages, or a JSONL file of any of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import token_ids
from eaglejax.config import Sampling
from eaglejax.errors import EagleJaxError, PromptError

CONTENT_KEYS = ("prompt", "token_ids", "messages", "turns")
_SAMPLING_KEYS = tuple(f.name for f in fields(Sampling))


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine takes it, its sampling, and its name in the output (a file's `id`, else its number)."""

    content: str | list[int] | list[dict[str, Any]]
    sampling: Sampling
    name: Any


def read_prompts(flags: FlagValues, sampling: Sampling) -> list[Prompt]:
    """All prompts, checked as far as that goes without a model.

    Raises:
        UsageError: none or several kinds are given. PromptError: a prompt is empty, or a line of the file is broken.
    """
    kinds = {name: given(flags, name) for name in ("prompt", "prompt_file", "token_ids")}
    # an empty --prompt is an empty prompt, not an unset flag
    kinds["prompt"] = flags["prompt"].value
    chosen = [name for name, value in kinds.items() if value is not None]
    if len(chosen) != 1:
        found = " and ".join(f"--{name}" for name in chosen) or "none"
        raise UsageError(f"give prompts in one way: --prompt, --token_ids or --prompt_file; found {found}")
    wrap = _Template(bool(flags["chat"].value), given(flags, "system"))
    if wrap.system is not None and not wrap.on:
        raise UsageError("--system needs --chat: without the chat template there is no system message")
    if chosen == ["prompt_file"]:
        return _read_file(kinds["prompt_file"], wrap, sampling)
    if chosen == ["token_ids"]:
        return [Prompt(token_ids("token_ids", text), sampling, n) for n, text in enumerate(kinds["token_ids"])]
    for text in kinds["prompt"]:
        _refuse_empty(text, "--prompt")
    return [Prompt(wrap(text), sampling, n) for n, text in enumerate(kinds["prompt"])]


@dataclass(frozen=True)
class _Template:
    """Text as it is, or as the user's message of a conversation."""

    on: bool
    system: str | None

    def __call__(self, text: str) -> str | list[dict[str, Any]]:
        return [*system_message(self.system), {"role": "user", "content": text}] if self.on else text


def system_message(text: str | None) -> list[dict[str, Any]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _refuse_empty(content: Any, where: str) -> None:
    if not content:
        raise PromptError("an empty prompt", where=where, found=repr(content), expected="at least one token")


def _read_file(path: str, wrap: _Template, sampling: Sampling) -> list[Prompt]:
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
    except OSError as error:
        raise PromptError("cannot be read", where=path, found=error.strerror) from None
    except UnicodeDecodeError as error:
        raise PromptError("not UTF-8 text", where=path, found=f"byte {error.start}") from None
    lines = text.removesuffix("\n").split("\n")
    passed_over: dict[str, None] = {}
    prompts = [_read_line(line, f"{path} line {n}", n, wrap, sampling, passed_over) for n, line in enumerate(lines, 1)]
    if passed_over:
        print(f"{path}: passed over: {', '.join(passed_over)}", file=sys.stderr)
    return prompts


def _read_line(
    line: str, where: str, number: int, wrap: _Template, sampling: Sampling, passed_over: dict[str, None]
) -> Prompt:
    expected = 'one JSON object a line, such as {"prompt": "..."}'
    if not line.strip():
        raise PromptError("an empty line", where=where, expected=expected)
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            "not valid JSON", where=where, found=f"{error.msg} at column {error.colno}", expected=expected
        ) from None
    if not isinstance(entry, dict):
        raise PromptError("not an object", where=where, found=type(entry).__name__, expected=expected)
    keys = [key for key in CONTENT_KEYS if key in entry]
    if len(keys) != 1:
        raise PromptError(
            "one kind of prompt a line",
            where=where,
            found=", ".join(keys or entry),
            expected=f"one of {', '.join(CONTENT_KEYS)}",
        )
    passed_over |= dict.fromkeys(key for key in entry if key not in (*CONTENT_KEYS, *_SAMPLING_KEYS, "id"))
    content = _content(keys[0], entry[keys[0]], where, wrap, passed_over)
    return Prompt(content, _sampling(entry, sampling, where), entry.get("id", number))


def _content(
    key: str, value: Any, where: str, wrap: _Template, passed_over: dict[str, None]
) -> str | list[int] | list[dict[str, Any]]:
    """The prompt of a line; what messages hold is checked by the engine."""
    if key == "turns":
        if not isinstance(value, list) or not value:
            raise PromptError("not a list of user turns", where=f"{where}: turns", found=json.dumps(value)[:80])
        if value[1:]:
            passed_over["turns after the first"] = None
        value = value[0]
    if key in ("prompt", "turns"):
        if not isinstance(value, str):
            raise PromptError("not text", where=f"{where}: {key}", found=type(value).__name__)
        _refuse_empty(value, f"{where}: {key}")
        return wrap(value)
    kind, named = (int, "whole numbers") if key == "token_ids" else (dict, "messages")
    if not isinstance(value, list) or not all(isinstance(x, kind) and not isinstance(x, bool) for x in value):
        raise PromptError(f"not a list of {named}", where=f"{where}: {key}", found=json.dumps(value)[:80])
    _refuse_empty(value, f"{where}: {key}")
    return value


def _sampling(entry: dict[str, Any], sampling: Sampling, where: str) -> Sampling:
    own = {key: value for key, value in entry.items() if key in _SAMPLING_KEYS}
    try:
        return replace(sampling, **own) if own else sampling
    except EagleJaxError as error:
        raise PromptError(
            error.what, where=f"{where}: {error.where}", found=error.found, expected=error.expected
        ) from None
    except (TypeError, ValueError):
        raise PromptError("a setting of the wrong kind", where=where, found=json.dumps(own)) from None
