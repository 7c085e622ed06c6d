"""Prompts as users write them, to token ids."""

from __future__ import annotations

import gzip
import json
import operator
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import PromptError
from eaglejax.text.chat import parse_messages
from eaglejax.text.interface import Tokenizer

_KINDS = "text, token ids, chat messages, or a list of them"
# fields of a JSONL prompt file; exactly one of them stands on each line
_FIELDS = ("prompt", "token_ids", "messages", "turns")


def parse_prompts(prompts: Any, tokenizer: Tokenizer | None, *, vocab_size: int, max_len: int) -> list[list[int]]:
    """Ids of one prompt or of a list of prompts: text, token ids (ints or a one-dimensional integer array), or chat
    messages.

    A list is one prompt when it holds ids ([5, 7]) or messages ([{"role": ...}]), a batch when it holds texts, lists or
    arrays ([[5]]); a batch may mix kinds. Text gets no special tokens; chat goes through the checkpoint's template.

    Arguments:
        tokenizer: None where the checkpoint has none: token ids only.
        vocab_size: rows of the target's embedding; ids must lie below.
        max_len: ids in a prompt at most.

    Raises PromptError naming the prompt's index: empty, an id out of range, too long, or of another type.
    """
    return [
        _encode(prompt, f"prompts[{n}]", tokenizer, vocab_size=vocab_size, max_len=max_len)
        for n, prompt in enumerate(split_batch(prompts))
    ]


def split_batch(prompts: Any) -> list[Any]:
    """The prompts of a batch; one prompt gives a list of one. See `parse_prompts` for what is what."""
    if _is_array(prompts):
        array = np.asarray(prompts)
        if array.ndim not in (1, 2):
            raise PromptError("an array of ids has one or two dimensions", where="prompts", found=f"{array.ndim}")
        return [array] if array.ndim == 1 else list(array)
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise PromptError(
            "one message is not a conversation",
            where="prompts",
            found="a dict",
            fix='put it into a list: [{"role": "user", ...}]',
        )
    if not isinstance(prompts, (list, tuple)):
        raise PromptError("not a prompt", where="prompts", found=type(prompts).__name__, expected=_KINDS)
    if not prompts:
        raise PromptError("no prompt given", where="prompts", found="an empty list", expected=_KINDS)
    batch = [isinstance(p, (str, list, tuple)) or (_is_array(p) and np.asarray(p).ndim == 1) for p in prompts]
    if all(batch):
        return list(prompts)
    if not any(batch):
        return [prompts]
    odd = batch.index(False)
    raise PromptError(
        "not a prompt", where=f"prompts[{odd}]", found=repr(prompts[odd]), expected="text, token ids or chat messages"
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and np.ndim(value) > 0


def _encode(prompt: Any, where: str, tokenizer: Tokenizer | None, *, vocab_size: int, max_len: int) -> list[int]:
    is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and any(isinstance(p, Mapping) for p in prompt)
    if isinstance(prompt, str) or is_chat:
        ids = _encode_words(prompt, where, tokenizer)
    else:
        ids = [_token_id(i, f"{where}[{n}]") for n, i in enumerate(np.asarray(prompt) if _is_array(prompt) else prompt)]
    if not ids:
        raise PromptError("the prompt is empty", where=where, expected="at least one token")
    for n, i in enumerate(ids):
        if not 0 <= i < vocab_size:
            raise PromptError(
                "a token id is outside the target's vocabulary",
                where=f"{where}[{n}]",
                found=i,
                expected=f"0 to {vocab_size - 1} (vocabulary of {vocab_size})",
            )
    if len(ids) > max_len:
        raise PromptError(
            "the prompt is too long",
            where=where,
            found=f"{len(ids)} tokens",
            expected=f"at most {max_len} (max_len)",
            fix="shorten it, or load the engine with a larger max_len",
        )
    return ids


def _encode_words(prompt: Any, where: str, tokenizer: Tokenizer | None) -> list[int]:
    """Ids of text or of chat messages; errors get the prompt's index."""
    if not isinstance(prompt, str):
        prompt = parse_messages(prompt, where)
    if tokenizer is None:
        raise PromptError(
            "this checkpoint has no tokenizer",
            where=where,
            found="text" if isinstance(prompt, str) else "chat messages",
            expected="token ids",
            fix="give ids, or put the model's tokenizer.json into the target's folder",
        )
    try:
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)
    except PromptError as error:
        place = where if error.where is None else f"{where}: {error.where}"
        raise PromptError(error.what, where=place, found=error.found, expected=error.expected, fix=error.fix) from None


def _token_id(value: Any, where: str) -> int:
    """An int from any whole number; bool is none."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PromptError(
        "not a token id", where=where, found=f"{value!r} of type {type(value).__name__}", expected="a whole number"
    )


def read_prompts(path: Path) -> list[Any]:
    """Prompts from a JSONL file (.gz: compressed), one object a line with one of: "prompt" (text), "token_ids",
    "messages" (chat), "turns" (texts; the first is asked as a user's message). Other fields are for the reader. Prompt
    n stands on line n + 1, so empty lines are refused.

    Raises PromptError naming the file and the line.
    """
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        found = getattr(error, "strerror", None) or error
        raise PromptError("cannot read the prompt file", where=path, found=found) from None
    lines = raw.removesuffix(b"\n").split(b"\n") if raw else []
    if not lines:
        raise PromptError("the prompt file is empty", where=path)
    return [_read_line(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def _read_line(line: bytes, where: str) -> Any:
    if not line.strip():
        raise PromptError("an empty line", where=where, expected="one JSON object on each line")
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise PromptError("not UTF-8 text", where=where, found=f"byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise PromptError("not valid JSON", where=where, found=f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise PromptError(
            "JSON that cannot be read", where=where, found=f"{type(error).__name__}: {error}"[:120]
        ) from None
    if not isinstance(entry, dict):
        raise PromptError("not a JSON object", where=where, found=type(entry).__name__)
    given = [field for field in _FIELDS if field in entry]
    if len(given) != 1:
        raise PromptError(
            "one prompt on each line",
            where=where,
            found=", ".join(given) or "none",
            expected="one of " + ", ".join(_FIELDS),
        )
    return _read_field(given[0], entry[given[0]], where)


def _read_field(field: str, value: Any, where: str) -> Any:
    place = f"{where}: {field}"
    if field == "messages":
        return parse_messages(value, place)
    if field == "prompt":
        if not isinstance(value, str) or not value:
            raise PromptError("not a text", where=place, found=repr(value))
        return value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise PromptError("not a list", where=place, found=repr(value), expected="at least one entry")
    if field == "token_ids":
        return [_token_id(i, f"{place}[{n}]") for n, i in enumerate(value)]
    if not isinstance(value[0], str) or not value[0]:
        raise PromptError("not a text", where=f"{place}[0]", found=repr(value[0]))
    return [{"role": "user", "content": value[0]}]
