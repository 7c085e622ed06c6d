"""From the target's answers to training rows: the draft vocabulary, and documents packed into rows of one length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from eaglejax.errors import ConfigError, PromptError
from eaglejax.training.ttt import Text

PADDING = -1  # segment number of places that hold no document


@dataclass(frozen=True)
class Document:
    """One prompt with its answer: token ids, where the answer begins, and whether an end token closed it."""

    tokens: Int[np.ndarray, " t"]
    answer: int
    ended: bool


def draft_vocabulary(documents: Iterable[Document], size: int, vocab_size: int) -> tuple[Int[np.ndarray, " w"], float]:
    """The `size` most frequent answer tokens, ascending, and the share of answer tokens they cover.

    Where fewer are seen, the lowest unseen ids fill up, so the map depends on the documents alone.
    """
    if not 0 < size <= vocab_size:
        raise ConfigError(
            "must lie within the target's vocabulary", where="draft_vocab_size", found=size, expected=f"1..{vocab_size}"
        )
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.answer :], minlength=vocab_size)
    if not counts.any():
        raise PromptError("no answer tokens to count", where="draft vocabulary")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen.astype(np.int32), float(counts[chosen].sum() / counts.sum())


def loss_places(document: Document) -> Bool[np.ndarray, " t"]:
    """Places i where the teacher's word on token i + 1 is worth learning: from the first answer token's successor on.

    The row before the answer is the one that drafts first after a prefill. Behind an end token nothing is foretold.
    """
    places = np.zeros(len(document.tokens), bool)
    places[max(document.answer - 1, 0) : len(document.tokens) - (2 if document.ended else 1)] = True
    return places


def pack(documents: Sequence[Document], row_length: int) -> Text:
    """Documents in as few rows as best-fit-decreasing finds; numpy arrays [rows, row_length].

    Raises PromptError for a document that is longer than a row, and where no place at all carries loss.
    """
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i].tokens))
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by room left
    for index in order:
        need = len(documents[index].tokens)
        if need > row_length:
            raise PromptError(
                "a document is longer than a row",
                where=f"document {index}",
                found=need,
                expected=f"at most {row_length}",
            )
        room = next((r for r in range(need, row_length) if open_rows[r]), None)
        row = open_rows[room].pop() if room is not None else len(rows)
        if room is None:
            rows.append([])
        rows[row].append(index)
        open_rows[(row_length if room is None else room) - need].append(row)
    shape = (len(rows), row_length)
    text = Text(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.full(shape, PADDING, np.int32),
        loss=np.zeros(shape, bool),
    )
    for row, members in enumerate(rows):
        start = 0
        for number, index in enumerate(members):
            document = documents[index]
            place = (row, slice(start, start + len(document.tokens)))
            text.tokens[place] = document.tokens
            text.positions[place] = np.arange(len(document.tokens))
            text.segments[place] = number
            text.loss[place] = loss_places(document)
            start += len(document.tokens)
    if not np.any(text.loss):
        raise PromptError("no token carries loss: the documents hold no answers", where="training data")
    return text
