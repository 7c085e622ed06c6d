"""Text from token ids that arrive bit by bit."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import SupportsIndex

from eaglejax.text.backend import Backend


class Detokenizer:
    """Turns ids into text as they come: the pieces from `push` and `flush` joined are `Tokenizer.decode` of all ids,
    however the ids are cut.

    A character split over several tokens is held back until its last byte is there. Work per token does not grow with
    the text. Made by `Tokenizer.detokenizer()`.

    Arguments:
        backend: gives each token's bytes.
        skipped: ids that add nothing to the text (special tokens); they do not cut through a character either.
    """

    def __init__(self, backend: Backend, skipped: frozenset[int] = frozenset()):
        self._backend = backend
        self._skipped = skipped
        self._first = True
        self._to_strip = backend.strip_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """The text that `ids` complete. Ids that are no token (rows of a padded vocabulary) add nothing."""
        return "".join([self.push_one(int(i.__index__())) for i in ids])

    def push_one(self, token_id: int) -> str:
        """The text that one id completes."""
        piece = None if token_id in self._skipped else self._backend.piece(token_id, self._first)
        if piece is None:
            return ""
        self._first = False
        if self._to_strip:
            spaces = min(self._to_strip, len(piece) - len(piece.lstrip(b" ")))
            piece = piece[spaces:]
            # anything but a space ends the start of the text
            self._to_strip = 0 if piece else self._to_strip - spaces
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What was held back, at the end of the text: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
