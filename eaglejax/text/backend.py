"""What a vocabulary must be able to do, and the one on top of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import tokenizers

from eaglejax.text.pieces import Pieces, pieces_of_decoder


@runtime_checkable
class Backend(Protocol):
    """A vocabulary: text to ids, and each id's share of the text.

    Attributes:
        size: one more than the highest id.
        strip_start: spaces dropped from the start of a text, at most.
    """

    size: int
    strip_start: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none is added."""
        ...

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """Bytes that `token_id` adds to a text (`first`: as its first token), or None for an id that is no token."""
        ...

    def token(self, token_id: int) -> str | None:
        """The token as its file writes it, or None for an id that is no token."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token as its file writes it, or None."""
        ...


class LibraryBackend:
    """A `tokenizers.Tokenizer` (tokenizer.json and GGUF)."""

    def __init__(self, library: tokenizers.Tokenizer, where: object):
        library.no_truncation()
        library.no_padding()
        self._library = library
        decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
        self._pieces: Pieces = pieces_of_decoder(decoder, where)
        self.strip_start = self._pieces.strip_start
        self.size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def piece(self, token_id: int, first: bool) -> bytes | None:
        token = self.token(token_id)
        return None if token is None else self._pieces.of(token, first)

    def token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id) if 0 <= token_id < self.size else None

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def recognise(self, tokens: Iterable[str]) -> None:
        """From now on these tokens of the vocabulary are found in text as wholes."""
        known = {added.content for added in self._library.get_added_tokens_decoder().values()}
        fresh = [t for t in tokens if t not in known and self.token_id(t) is not None]
        self._library.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in fresh])
