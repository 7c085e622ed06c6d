"""Training text from JSONL: conversations through the target's chat template, or answers that the target gave before.

A line is one object with one of
    messages / conversations   [{"role": .., "content": ..}, ...], also with "from" and "value"; loss on assistant turns
    prompt_ids, token_ids      what `regenerate` writes: the exact tokens of a prompt and of the target's answer
    prompt / turns             a prompt alone, for `regenerate` and for evaluation: no loss
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import PromptError
from eaglejax.text.interface import Tokenizer
from eaglejax.training.data import Document, loss_places
from eaglejax.training.lines import kind_of, messages_of, prompt_text, read_lines


@dataclass(frozen=True)
class Corpus:
    """Documents, and what became of the lines.

    tokens: of all documents. counted: places with loss. cut: longer than a row, cut there. without_loss: left out,
    since no place of theirs carries loss. cut_away: of those, how many the cut left no answer.
    """

    documents: list[Document]
    lines: int
    tokens: int
    counted: int
    cut: int
    without_loss: int
    cut_away: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.documents)} documents of {self.lines} lines, {self.counted} of {self.tokens} tokens carry loss; "
            f"{self.cut} cut to the row length, {self.without_loss} without loss left out"
            + (f" ({self.cut_away} of them since the cut left no answer)" if self.cut_away else "")
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts that fit, and how many others were too long."""

    fitting: list[list[int]]
    too_long: int


@dataclass(frozen=True)
class Reader:
    """How lines become tokens.

    tokenizer: None where the target has none: lines must then hold ids. end_ids: the target's end tokens.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    end_ids: Collection[int]

    def corpus(self, files: Sequence[str | Path], row_length: int) -> Corpus:
        """All lines of all files as documents of at most `row_length` tokens.

        Raises PromptError naming file and line: an empty file, broken JSON, an id that the target does not have; and
        where no token at all carries loss.
        """
        documents, lines, tokens, counted, cut, empty, away = [], 0, 0, 0, 0, 0, 0
        for where, row in read_lines(files):
            lines += 1
            whole = document = self.document(row, where)
            if whole is not None and len(whole.tokens) > row_length:
                cut += 1
                document = shortened(whole, row_length)
            size = self._size(row, where) if document is None else len(document.tokens)
            found = 0 if document is None else int(loss_places(document).sum())
            away += found == 0 and document is not whole
            tokens, counted, empty = tokens + size, counted + found, empty + (found == 0)
            if document is not None and found:
                documents.append(document)
        if not counted and away:
            raise PromptError(
                f"0 of {tokens} tokens carry loss: the answers begin where the row ends",
                where=", ".join(map(str, files)),
                found=f"{away} of {lines} lines whose answers are cut away at row_length {row_length}",
                expected="prompts short enough that answers fit behind them",
                fix="a larger row_length, or shorter prompts",
            )
        if not counted:
            raise PromptError(
                f"0 of {tokens} tokens carry loss",
                where=", ".join(map(str, files)),
                found=f"{lines} lines without an answer that the chat template marks",
                expected="assistant turns, or prompt_ids and token_ids",
                fix="let the target answer the prompts first (regenerate)",
            )
        return Corpus(documents, lines, tokens, counted, cut, empty, away)

    def prompts(self, files: Sequence[str | Path], longest: int) -> Prompts:
        """The prompt of every line, up to the last user turn; those longer than `longest` tokens are left out, counted.

        Raises PromptError as `corpus`, and where none is short enough.
        """
        found = [self.prompt(row, where) for where, row in read_lines(files)]
        fitting = [prompt for prompt in found if len(prompt) <= longest]
        if not fitting:
            raise PromptError(
                "no prompt is short enough",
                where=", ".join(map(str, files)),
                found=f"{min(map(len, found))} tokens or more in {len(found)} prompts",
                expected=f"at most {longest}",
                fix="a larger row_length, or shorter prompts",
            )
        return Prompts(fitting, len(found) - len(fitting))

    def document(self, row: dict[str, Any], where: str) -> Document | None:
        """The line's document; None where no answer of it is marked by the template."""
        kind = kind_of(row, where)
        if kind == "prompt_ids":
            prompt, answer = (self._ids(row.get(name), f"{where}: {name}") for name in ("prompt_ids", "token_ids"))
            tokens = np.asarray([*prompt, *answer], np.int32)
            return Document(tokens, len(prompt), bool(answer) and answer[-1] in self.end_ids) if answer else None
        if kind in ("prompt", "turns"):
            return None
        return self._conversation(messages_of(row[kind], f"{where}: {kind}"), where)

    def prompt(self, row: dict[str, Any], where: str) -> list[int]:
        """Token ids up to where the last answer would begin."""
        kind = kind_of(row, where)
        if kind == "prompt_ids":
            return self._ids(row["prompt_ids"], f"{where}: prompt_ids")
        if kind in ("prompt", "turns"):
            messages = [{"role": "user", "content": prompt_text(row[kind], kind, f"{where}: {kind}")}]
        else:
            messages = messages_of(row[kind], f"{where}: {kind}")
            users = [n for n, message in enumerate(messages) if message["role"] == "user"]
            if not users:
                raise PromptError(
                    "a conversation without a user's turn: there is nothing to answer",
                    where=f"{where}: {kind}",
                    found="roles " + ", ".join(message["role"] for message in messages)[:80],
                    expected="a user's turn",
                    fix="add one, or take the line out",
                )
            messages = messages[: users[-1] + 1]
        return self._render(messages, where, True)

    def _size(self, row: dict[str, Any], where: str) -> int:
        """Tokens of a line without an answer."""
        kind = kind_of(row, where)
        if kind in ("prompt_ids", "prompt", "turns"):
            return len(self.prompt(row, where))
        return len(self._render(messages_of(row[kind], f"{where}: {kind}"), where, False))

    def _conversation(self, messages: list[dict[str, Any]], where: str) -> Document | None:
        whole = self._render(messages, where, False)
        answers: list[tuple[int, int, bool]] = []
        for n, message in enumerate(messages):
            if message["role"] != "assistant" or n == 0:
                continue
            before = self._render(messages[:n], where, True)
            after = self._render(messages[: n + 1], where, False)
            if whole[: len(before)] != before:
                continue  # the template writes this turn in another way than it is asked for
            same = sum(1 for _ in _common(whole, after))
            ends = [place for place in range(len(before), same) if whole[place] in self.end_ids]
            end = ends[0] + 1 if ends else same
            if end > len(before) and (ends or n == len(messages) - 1):
                answers.append((len(before), end, bool(ends)))
        if not answers:
            return None
        begin, end, ended = answers[-1]
        return Document(np.asarray(whole[:end], np.int32), begin, ended, tuple((b, e) for b, e, _ in answers[:-1]))

    def _render(self, messages: list[dict[str, Any]], where: str, ask: bool) -> list[int]:
        if self.tokenizer is None:
            raise PromptError(
                "the target has no tokenizer",
                where=where,
                found="text",
                expected="prompt_ids and token_ids",
                fix="give exact tokens, or put the target's tokenizer.json into its folder",
            )
        try:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=ask)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from None
        return self._ids(ids, where)

    def _ids(self, ids: Any, where: str) -> list[int]:
        whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not whole:
            raise PromptError(
                "token ids are a list of whole numbers",
                where=where,
                found=repr(ids)[:80],
                expected="such as [1, 2, 3]",
                fix="correct the line: an answer needs both prompt_ids and token_ids",
            )
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise PromptError(
                "a token id that the target does not have: the text was made with another tokenizer",
                where=where,
                found=wrong,
                expected=f"0..{self.vocab_size - 1}",
                fix="tokenize it with this target's tokenizer, or give text",
            )
        return ids


def shortened(document: Document, length: int) -> Document | None:
    """The document cut to `length` tokens, its answers with it; None where none of them is left."""
    answers = [(begin, min(end, length)) for begin, end in document.answers if begin < length]
    if not answers:
        return None
    begin, end = answers[-1]
    was_closed = end < length or any(answers[-1] == closed for closed in document.earlier)
    return Document(document.tokens[:end], begin, was_closed, tuple(answers[:-1]))


def _common(one: list[int], other: list[int]) -> Iterator[int]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a
