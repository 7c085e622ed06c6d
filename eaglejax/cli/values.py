"""What the text of flags stands for. A value that is none is wrong usage, not refused input."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eaglejax.cli.flags import UsageError
from eaglejax.config import Speculation
from eaglejax.errors import ConfigError, EagleJaxError

T = TypeVar("T")


def wrong_usage(make: Callable[[], T]) -> T:
    """What `make` returns; a refusal of a flag's value is wrong usage."""
    try:
        return make()
    except EagleJaxError as error:
        message = str(error)
        raise UsageError(message if message.startswith("--") else f"--{message}") from None


def tree(text: str) -> Speculation:
    """A tree as num_steps,topk,num_draft_tokens; the last may be left out. Raises UsageError."""
    parts = text.split(",")
    if len(parts) not in (2, 3):
        raise UsageError(f"--tree: no tree; found {text!r}; expected num_steps,topk,num_draft_tokens such as 3,1,4")
    try:
        return Speculation(*parts)  # pyright: ignore[reportArgumentType]
    except ConfigError as error:
        raise UsageError(f"--tree: {error}") from None
