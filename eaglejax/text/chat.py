"""Chat messages to prompt text, by the checkpoint's own jinja2 template.

Templates come with checkpoints, so they are untrusted: they run in jinja2's immutable sandbox. Settings, filters and
globals are those that templates on the hub are written for (transformers' chat templating): trim_blocks, lstrip_blocks,
loop controls, `tojson` without escaping, `raise_exception`, `strftime_now`, and {% generation %} blocks, which mark the
assistant's text and add nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from eaglejax.errors import CheckpointError, PromptError

Message = Mapping[str, Any]


class _Refused(jinja2.TemplateError):
    """What a template raises through raise_exception."""


class _GenerationBlocks(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _environment() -> jinja2.Environment:
    extensions = [_GenerationBlocks, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A chat template, compiled at its first use: a broken one does not keep a model from completing plain text.

    Arguments:
        source: the jinja2 text.
        where: its file, for errors.
        named_tokens: bos_token, eos_token, ... as text, which templates may write.
    """

    def __init__(self, source: str, where: object, named_tokens: Mapping[str, str]):
        self.source = source
        self._where = where
        self._named_tokens = dict(named_tokens)
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Text of a conversation. `variables` go to the template as they are (tools, enable_thinking, ...).

        Raises PromptError for messages that the template refuses, CheckpointError for a template that does not compile.
        """
        if self._template is None:
            try:
                self._template = _environment().from_string(self.source)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    "the chat template does not compile",
                    where=self._where,
                    found=f"{error.message} at line {error.lineno}",
                ) from None
        known = {"tools": None, "documents": None, **self._named_tokens, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except _Refused as error:
            raise PromptError("the chat template refuses these messages", where=self._where, found=str(error)) from None
        except Exception as error:  # a template is a program of the checkpoint's author: it may fail in any way
            found = f"{type(error).__name__}: {error}"
            raise PromptError("the chat template failed on these messages", where=self._where, found=found) from None


def parse_messages(messages: Any, where: str = "messages") -> list[dict[str, Any]]:
    """`messages` as a template takes them: each with a role and text. Lists of {"type": "text"} parts are joined.

    Raises PromptError naming the message at fault.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(
            "chat messages are a list",
            where=where,
            found=type(messages).__name__,
            expected='[{"role": "user", "content": "..."}]',
        )
    if not messages:
        raise PromptError("no messages", where=where, found="an empty list", expected="at least one message")
    return [_check_message(message, f"{where}[{n}]") for n, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(
            "not a message", where=where, found=type(message).__name__, expected='{"role": "user", "content": "..."}'
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(
            "a message needs a role", where=f"{where}.role", found=repr(role), expected="user, assistant, system, ..."
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(_part_text(part, f"{where}.content[{n}]") for n, part in enumerate(content))
    if not isinstance(content, str):
        raise PromptError(
            "a message needs text",
            where=f"{where}.content",
            found=repr(content),
            expected='text or a list of {"type": "text", "text": "..."}',
        )
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(
        "only text is served", where=where, found=f"a part of type {kind!r}", expected='{"type": "text", "text": "..."}'
    )


def no_template(where: object) -> CheckpointError:
    """The error for chat without a template."""
    file = Path(str(where)) / "chat_template.jinja"
    return CheckpointError(
        "this checkpoint has no chat template",
        where=where,
        fix=f"give the prompt as text, or put the model's template into {file}",
    )
