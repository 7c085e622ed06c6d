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
    """A conversation that ends with an answer: token ids, where that answer begins, whether an end token closed it.

    earlier: [begin, end) of the answers before it, each with the end token that closed it.
    """

    tokens: Int[np.ndarray, " t"]
    answer: int
    ended: bool
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def answers(self) -> tuple[tuple[int, int], ...]:
        """[begin, end) of every answer."""
        return (*self.earlier, (self.answer, len(self.tokens)))


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
        for begin, end in document.answers:
            counts += np.bincount(document.tokens[begin:end], minlength=vocab_size)
    if not counts.any():
        raise PromptError("no answer tokens to count", where="draft vocabulary")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen.astype(np.int32), float(counts[chosen].sum() / counts.sum())


def loss_places(document: Document) -> Bool[np.ndarray, " t"]:
    """Places i where the teacher's word on token i + 1 is worth learning: from the first answer token's successor on.

    The row before the answer is the one that drafts first after a prefill: it reads the answer's first token, which the
    prefill gave, and foretells the second. Behind an end token nothing is foretold.
    """
    places = np.zeros(len(document.tokens), bool)
    for begin, end in document.answers:
        closed = document.ended or end < len(document.tokens)
        places[max(begin - 1, 0) : max(end - (2 if closed else 1), 0)] = True
    return places


@dataclass(frozen=True)
class Place:
    """What row `place` does at one step of the unroll: it reads one token and foretells the next."""

    step: int
    place: int
    reads: int
    foretells: int | None  # None: behind the end of the document
    counts: bool


def mask_table(document: Document, steps: int) -> list[Place]:
    """Every row of a document at every step of the unroll, so that a loss mask can be looked at."""
    loss, tokens = loss_places(document), document.tokens.tolist()
    table = []
    for step in range(steps):
        for place in range(len(tokens) - 1 - step):
            after = place + step + 2
            foretells = tokens[after] if after < len(tokens) else None
            table.append(Place(step, place, tokens[after - 1], foretells, bool(loss[place + step])))
    return table


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


def batch_rows(number: int, rows: int, batch: int, seed: int) -> tuple[Int[np.ndarray, " n"], int]:
    """The rows of batch `number` of a run, and its epoch; a function of these alone, so the step is the whole position.

    Every epoch goes through all rows in an order of its own; a remainder shorter than a batch is left out of it. Fewer
    than `batch` rows come back only where there are fewer in all.
    """
    each = max(1, rows // batch)
    epoch, place = divmod(number, each)
    order = np.random.default_rng([seed, epoch]).permutation(rows)
    return order[place * batch : (place + 1) * batch], epoch


def batch_of(text: Text, rows: Int[np.ndarray, " n"], batch: int) -> Text:
    """These rows of a text, numpy arrays; short of a full batch the first is repeated without loss."""
    missing = batch - len(rows)
    chosen = np.concatenate([rows, np.zeros(missing, rows.dtype)])
    parts = {name: np.asarray(getattr(text, name))[chosen] for name in ("tokens", "positions", "segments", "loss")}
    parts["loss"][len(rows) :] = False
    return Text(**parts)
