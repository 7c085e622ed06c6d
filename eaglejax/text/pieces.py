"""From one token to the bytes it adds to the text.

A tokenizer's decoder is a list of steps over all tokens of a text. Every decoder used by language models can be told as
"each token adds these bytes", with small exceptions at the start of the text. Told so, text can be made token by token
(`detokenizer.py`), and whole texts and streams agree by construction. Decoders that look ahead (WordPiece's clean-up,
CTC, ...) are refused by name.

One difference to the `tokenizers` library is wanted: there, one bad byte token spoils the whole run of byte tokens
around it; here invalid UTF-8 turns into U+FFFD by Unicode's own rule (one per maximal broken part), whatever the
tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglejax.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the 68 others are numbered from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {b: chr(b) for b in plain}
    others = (b for b in range(256) if b not in letters)
    return letters | {b: chr(0x100 + n) for n, b in enumerate(others)}


_BYTE_OF_LETTER = {letter: byte for byte, letter in byte_letters().items()}


def letters_to_bytes(token: str) -> bytes:
    """A byte-level token's bytes. A token with any other letter in it (an added one, say) is text as it stands."""
    try:
        return bytes(_BYTE_OF_LETTER[c] for c in token)
    except KeyError:
        return token.encode()


@dataclass(frozen=True)
class Pieces:
    """What each token adds to the text.

    Arguments:
        replacements: (old, new) strings replaced within a token, in order.
        byte_level: tokens are written in GPT-2's byte letters.
        byte_fallback: tokens like `<0xE2>` are that byte.
        strip_start: spaces dropped from the very start of the text, at most.
        drop_at_start: this letter is dropped from the text's first token (Metaspace), elsewhere it is a space.
        separator: goes between tokens (a tokenizer without decoder).
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    strip_start: int = 0
    drop_at_start: str = ""
    separator: str = ""

    def of(self, token: str, first: bool) -> bytes:
        """Bytes that `token` adds; `first`: it is the first token of the text."""
        if self.drop_at_start:
            token = token.replace(self.drop_at_start, "" if first else " ")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_level:
            return letters_to_bytes(token)
        if self.byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match[1])
        return (token if first else self.separator + token).encode()


def pieces_of_decoder(decoder: Mapping[str, Any] | None, where: object) -> Pieces:
    """`Pieces` from the "decoder" entry of a tokenizer.json. Raises CheckpointError naming a step that cannot be told
    so."""
    if decoder is None:
        return Pieces(separator=" ")
    found: dict[str, Any] = {}
    replacements: list[tuple[str, str]] = []
    for step in _flat(decoder):
        kind = step.get("type")
        if kind in ("Replace", "Metaspace") and not found:
            if kind == "Metaspace":
                replacement = step.get("replacement", "▁")
                keep = step.get("prepend_scheme", "always") == "never"
                if keep or replacements:
                    replacements.append((replacement, " "))
                else:
                    found["drop_at_start"] = replacement
            elif "String" in (pattern := step.get("pattern", {})):
                replacements.append((pattern["String"], step.get("content", "")))
            else:
                raise _unsupported("Replace with a regular expression", where)
        elif kind == "ByteLevel" and not found:
            found["byte_level"] = True
        elif kind == "ByteFallback" and not found:
            found["byte_fallback"] = True
        elif kind == "Fuse":
            found["fused"] = True
        elif kind == "Strip" and "fused" in found and step.get("content") == " " and not step.get("stop"):
            found["strip_start"] = step.get("start", 0)
        else:
            raise _unsupported(str(kind), where)
    found.pop("fused", None)
    return Pieces(replacements=tuple(replacements), **found)


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [leaf for step in decoder.get("decoders", []) for leaf in _flat(step)]


def _unsupported(kind: str, where: object) -> CheckpointError:
    return CheckpointError(
        "this tokenizer's decoder cannot be run token by token",
        where=where,
        found=f"decoder step {kind} at that place",
        expected="ByteLevel, or Replace / Metaspace / ByteFallback, then Fuse, then Strip of leading spaces",
    )
