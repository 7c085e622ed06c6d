"""The small JSON files beside a vocabulary: which tokens are special, what ends a text, how a chat is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.json_file import read_json
from eaglejax.errors import CheckpointError
from eaglejax.text.chat import ChatTemplate

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedTokenEntry:
    """One line of `added_tokens_decoder`: a token with its id; `special` ones are left out of decoded text."""

    token_id: int
    content: str
    special: bool


@dataclass(frozen=True)
class TokenizerFiles:
    """What tokenizer_config.json and its companions say.

    Arguments:
        config: tokenizer_config.json, {} where it is absent.
        added: `added_tokens_decoder`, by id.
        named: bos_token, eos_token, ... -> the token's text.
        also_special: additional_special_tokens / extra_special_tokens.
        chat: the template, or None.
        where: the file to name in errors.
    """

    config: Mapping[str, Any]
    added: tuple[AddedTokenEntry, ...]
    named: Mapping[str, str]
    also_special: tuple[str, ...]
    chat: ChatTemplate | None
    where: Path
    notes: tuple[str, ...] = field(default=())


def read_text(path: Path) -> str:
    """The text in `path`. Raises CheckpointError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError("not UTF-8 text", where=path, found=f"byte {error.start}") from None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads tokenizer_config.json, special_tokens_map.json and the chat template of `folder`; all may be absent."""
    where = folder / "tokenizer_config.json"
    config = read_json(where) if where.is_file() else {}
    legacy = folder / "special_tokens_map.json"
    merged = {**(read_json(legacy) if legacy.is_file() else {}), **config}
    named = {name: text for name in NAMED if (text := _content(merged.get(name), where, name)) is not None}
    also: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = merged.get(key) or []
        # a mapping gives names to further tokens (image_token: ...)
        entries = list(entries.values()) if isinstance(entries, Mapping) else entries
        also += [text for entry in entries if (text := _content(entry, where, key)) is not None]
    template, source = _read_template(folder, config)
    return TokenizerFiles(
        config=config,
        added=_read_added(config, where),
        named=named,
        also_special=tuple(dict.fromkeys(also)),
        chat=None if template is None else ChatTemplate(template, source, named),
        where=where,
        notes=("no chat template" if template is None else f"chat template from {source.name}",),
    )


def _content(entry: Any, where: Path, name: str) -> str | None:
    """A token given as text or as {"content": text, ...}."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    if entry is None or isinstance(entry, str):
        return entry
    raise CheckpointError(
        "not a token", where=f"{where}: {name}", found=repr(entry), expected='text or {"content": text}'
    )


def _read_added(config: Mapping[str, Any], where: Path) -> tuple[AddedTokenEntry, ...]:
    added = []
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, Mapping):
        raise CheckpointError("wrong JSON value", where=f"{where}: added_tokens_decoder", found=type(entries).__name__)
    for key, entry in entries.items():
        content = _content(entry, where, f"added_tokens_decoder[{key}]")
        if not str(key).isdecimal() or not content:
            raise CheckpointError(
                "not an id with its token", where=f"{where}: added_tokens_decoder", found=f"{key!r}: {entry!r}"
            )
        special = bool(entry.get("special", False)) if isinstance(entry, Mapping) else True
        added.append(AddedTokenEntry(int(key), content, special))
    return tuple(sorted(added, key=lambda entry: entry.token_id))


def _read_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, Path]:
    """The chat template and its file: chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return read_text(jinja), jinja
    source = folder / "chat_template.json"
    template = read_json(source).get("chat_template") if source.is_file() else None
    if template is None:
        source, template = folder / "tokenizer_config.json", config.get("chat_template")
    if template is None or isinstance(template, str):
        return template, source
    named = _named_templates(template, source)
    if "default" in named:
        return named["default"], source
    if len(named) == 1:
        return next(iter(named.values())), source
    raise CheckpointError(
        "several chat templates and none is called default",
        where=f"{source}: chat_template",
        found=", ".join(sorted(named)) or "none",
        fix="put the one to use into chat_template.jinja",
    )


def _named_templates(template: Any, source: Path) -> dict[str, str]:
    """Templates given as [{"name": ..., "template": ...}] or {name: template}."""
    if isinstance(template, list) and all(isinstance(t, Mapping) for t in template):
        template = {t.get("name"): t.get("template") for t in template}
    if isinstance(template, Mapping) and all(isinstance(x, str) for pair in template.items() for x in pair):
        return dict(template)
    raise CheckpointError(
        "not a chat template",
        where=f"{source}: chat_template",
        found=type(template).__name__,
        expected='text, or a list of {"name": ..., "template": ...}',
    )
