"""What the text of flags stands for. A value that is none is wrong usage, not refused input."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eaglejax.cli.flags import UsageError
from eaglejax.config import Speculation, whole_number
from eaglejax.errors import ConfigError, EagleJaxError

T = TypeVar("T")


def wrong_usage(make: Callable[[], T]) -> T:
    """What `make` returns; a refusal of a flag's value is wrong usage."""
    try:
        return make()
    except EagleJaxError as error:
        message = str(error)
        raise UsageError(message if message.startswith("--") else f"--{message}") from None


def tree_numbers(text: str) -> tuple[int, int, int]:
    """What stands in num_steps,topk,num_draft_tokens, whether or not a tree can be so. Raises UsageError."""
    parts = text.split(",")
    # two numbers could be meant as either pair
    if len(parts) != 3:
        raise UsageError(f"--tree: no tree; found {text!r}; expected num_steps,topk,num_draft_tokens such as 3,1,4")
    low = {"num_steps": 0, "topk": 1, "num_draft_tokens": 1}
    try:
        steps, topk, nodes = (whole_number(name, part, low[name]) for name, part in zip(low, parts, strict=True))
    except ConfigError as error:
        raise UsageError(f"--tree: {error}") from None
    return steps, topk, nodes


def tree(text: str) -> Speculation:
    """A tree as num_steps,topk,num_draft_tokens. Raises UsageError."""
    numbers = tree_numbers(text)
    try:
        return Speculation(*numbers)
    except ConfigError as error:
        raise UsageError(f"--tree: {error}") from None
