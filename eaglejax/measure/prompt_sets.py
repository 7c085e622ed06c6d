"""Prompts to measure with: sets that come with the package, files of your own, and random token ids as the worst case."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import PromptError
from eaglejax.text.prompts import read_prompts as read_file

FOLDER = Path(__file__).parent.parent / "builtin" / "prompts"
RANDOM = "random"
RANDOM_COUNT, RANDOM_TOKENS = 80, 64
SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `source`: its set's name, or its file. `number`: its place there, from 0. `content`: as
    `EagleJaxEngine.generate` takes it."""

    source: str
    number: int
    content: Any

    @property
    def name(self) -> str:
        """What to call it in reports."""
        return f"{self.source}[{self.number}]"


def known_sets() -> list[str]:
    """Names of the built-in sets, `random` last."""
    return [*sorted(file.stem for file in FOLDER.glob("*.jsonl")), RANDOM]


def check_set(name: str) -> None:
    """Refuse what is neither a built-in set nor a file, without reading anything.

    Raises PromptError with the sets there are and the nearest name.
    """
    if name in known_sets() or Path(name).is_file():
        return
    near = difflib.get_close_matches(name.lower(), known_sets(), n=1, cutoff=0.5)
    raise PromptError(
        "no such prompt set",
        where="prompts",
        found=repr(name),
        expected=f"one of {', '.join(known_sets())}, or a file of JSON lines ({' or '.join(SUFFIXES)})",
        fix=f"did you mean {near[0]}?" if near else None,
    )


def check_prompts(name: str) -> None:
    """Refuse, as far as that goes without a model, a set that is not there and a file that holds a broken line. Raises PromptError."""
    check_set(name)
    if name not in known_sets():
        read_file(Path(name))


def read_prompts(
    name: str | Path, limit: int = 0, *, vocab_size: int = 0, seed: int = 0, chat: bool = True
) -> list[Prompt]:
    """The prompts of a set.

    Arguments:
        name: a built-in set ("mt_bench", "humaneval", "gsm8k", "qa"), a JSONL file (.gz too) with one of `prompt`, `turns`, `messages`,
            `token_ids` on each line, or "random": random token ids, on which a draft can hardly be right.
        limit: this many, spread evenly over the set, since sets are ordered by category; 0: all.
        vocab_size: ids of "random" lie below; needed there alone.
        seed: of "random".
        chat: text is asked as a user's message; otherwise it is completed as it stands.

    Raises PromptError: no such set, or a line that holds no prompt, named by its number.
    """
    name = str(name)
    check_set(name)
    if name == RANDOM:
        return _random(limit or RANDOM_COUNT, vocab_size, seed)
    file = FOLDER / f"{name}.jsonl" if name in known_sets() else Path(name)
    contents = [_asked(content, chat) for content in read_file(file)]
    return [Prompt(name, number, contents[number]) for number in spread(len(contents), limit)]


def spread(count: int, limit: int) -> Sequence[int]:
    """`limit` numbers of 0 .. count - 1 at even distances; all of them for 0 or where there are no more."""
    if not limit or limit >= count:
        return range(count)
    return [index * count // limit for index in range(limit)]


def _asked(content: Any, chat: bool) -> Any:
    if chat and isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not chat and isinstance(content[0], dict) and len(content) == 1:
        return content[0]["content"]
    return content


def _random(count: int, vocab_size: int, seed: int) -> list[Prompt]:
    if vocab_size < 1:
        raise PromptError(
            "random token ids need a vocabulary", where=RANDOM, found=f"vocab_size {vocab_size}", expected="1 or more"
        )
    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, RANDOM_TOKENS))
    return [Prompt(RANDOM, number, row.tolist()) for number, row in enumerate(ids)]
