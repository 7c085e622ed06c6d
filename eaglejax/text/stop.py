"""Stop strings over a stream of token ids.

The rule: tokens are looked at one by one, as plain decoding makes them. The first token after which the text holds a
stop string ends it; of several complete at that token the one that starts earliest wins, then the one listed first. So
the answer depends on the ids alone, never on how they were cut into blocks. The text ends before the match, the ids
with the token that completed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from eaglejax.errors import ConfigError
from eaglejax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopMatch:
    """Where a stream ended.

    Arguments:
        token_count: ids up to and including the one that completes the match.
        text: everything before the match.
        stop: the stop string.
    """

    token_count: int
    text: str
    stop: str


class _Matcher:
    """One stop string against text that comes letter by letter (Knuth-Morris-Pratt): constant work per letter on
    average."""

    def __init__(self, stop: str):
        self.stop = stop
        self.matched = 0  # the longest end of the text so far that begins the stop string
        self._fallback = [0] * (len(stop) + 1)
        k = 0
        for n in range(1, len(stop)):
            while k and stop[n] != stop[k]:
                k = self._fallback[k]
            k += stop[n] == stop[k]
            self._fallback[n + 1] = k

    def feed(self, text: str) -> int | None:
        """Position in `text` just behind the first match, or None."""
        for n, letter in enumerate(text):
            while self.matched and letter != self.stop[self.matched]:
                self.matched = self._fallback[self.matched]
            self.matched += letter == self.stop[self.matched]
            if self.matched == len(self.stop):
                return n + 1
        return None


class TextStream:
    """Ids in, printable text out, ended by the first stop string.

    What `push` returns is never part of a stop string: an end of the text that could still become one is held back
    (fewer letters than the longest stop string has). All returned pieces joined are the text, whatever the cut of the
    ids.

    Arguments:
        tokenizer: None where the checkpoint has none: there is no text then, and stop strings are refused.
        stop: stop strings, not empty.
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), *, skip_special_tokens: bool = True):
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise ConfigError("stop strings must be non-empty text", where="stop", found=repr(stop))
        if stops and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer and this checkpoint has none",
                where="stop",
                found=repr(stop),
                fix="use stop_token_ids, or add a tokenizer.json to the target's folder",
            )
        self._detokenizer = (
            None if tokenizer is None else tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        )
        self._matchers = [_Matcher(s) for s in stops]
        self._held = ""
        self._given: list[str] = []
        self._count = 0
        self.match: StopMatch | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._given)

    def push(self, ids: Iterable[SupportsIndex]) -> tuple[str, StopMatch | None]:
        """The text that may be printed now, and the match once there is one. Ids behind a match are ignored, in this
        call and later ones."""
        before = len(self._given)
        for i in ids:
            if self.match is not None:
                break
            self._count += 1
            if self._detokenizer is not None:
                self._take(self._detokenizer.push_one(int(i.__index__())))
        return "".join(self._given[before:]), self.match

    def finish(self) -> str:
        """The rest of the text when the ids have ended without a match (or "" after one): what was held back, an
        unfinished character as U+FFFD."""
        if self.match is not None or self._detokenizer is None:
            return ""
        rest = self._held + self._detokenizer.flush()
        self._held = ""
        self._given.append(rest)
        return rest

    def _take(self, piece: str) -> None:
        """Moves one token's text through the matchers: out, or into what is held back."""
        if not piece:
            return
        ends = [(matcher, matcher.feed(piece)) for matcher in self._matchers]
        # where each match starts, counted from the start of the held text
        starts = [(len(self._held) + end - len(m.stop), m.stop) for m, end in ends if end is not None]
        buffer = self._held + piece
        if starts:
            start, stop = min(starts, key=lambda hit: hit[0])
            self._given.append(buffer[:start])
            self._held = ""
            self.match = StopMatch(self._count, self.text, stop)
            return
        keep = max((m.matched for m in self._matchers), default=0)
        self._given.append(buffer[: len(buffer) - keep])
        self._held = buffer[len(buffer) - keep :]
