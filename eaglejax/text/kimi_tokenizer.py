"""tiktoken.model: the vocabulary of the Kimi models (Moonlight, Kimi-K2, Kimi-K2.5), which ship no tokenizer.json.

The file lists byte strings with their ranks; the rank is the id and the order of merging. What the checkpoints' own
Python code adds is told here instead of being run: how text is split before merging, and the 256 special ids behind the
ranks, named by `added_tokens_decoder` in tokenizer_config.json or else `<|reserved_token_ID|>`. The merging is done by
the `tiktoken` package, whose order of merges defines the ids (a list of merges for the `tokenizers` library can differ
where two splits of one token compete).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path

from eaglejax.errors import CheckpointError
from eaglejax.text.hf_tokenizer import named_ids
from eaglejax.text.interface import Tokenizer
from eaglejax.text.pieces import byte_letters, letters_to_bytes
from eaglejax.text.tokenizer_files import TokenizerFiles, read_tokenizer_files

RESERVED = 256
# the class whose behaviour is built in; another one might split text differently
_CLASS = "TikTokenTokenizer"

# Letters other than Chinese characters, in the two cases that a word is made of: small (or caseless) and capital (or
# caseless).
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # one mark or space may lead a word
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",  # a run of Chinese characters
        _BEFORE + _CAPITAL + "*" + _SMALL + "+" + _ENDING,  # a word that ends in small letters
        _BEFORE + _CAPITAL + "+" + _SMALL + "*" + _ENDING,  # a word of capitals
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # marks
        r"\s*[\r\n]+",  # line ends
        r"\s+(?!\S)",  # spaces, but for the last one before a word
        r"\s+",
    )
)
# Longer texts, and longer runs without a change between spaces and other letters, are cut before they are split, as the
# models' own code does.
_MAX_TEXT, _MAX_RUN = 400_000, 25_000
_RUNS = re.compile(r"\s+|\S+")
_LETTERS = byte_letters()


class TiktokenBackend:
    """Ranks and special tokens in a `tiktoken.Encoding`.

    Arguments:
        ranks: byte string -> id, 0 .. n-1.
        special: special token -> id, n and above.
    """

    strip_start = 0

    def __init__(self, ranks: dict[bytes, int], special: dict[str, int], where: object):
        try:
            import tiktoken
        except ModuleNotFoundError:
            raise CheckpointError(
                "this tokenizer needs the tiktoken package", where=where, fix='pip install "eaglejax[tiktoken]"'
            ) from None
        self._encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self._ranks, self._special = ranks, special
        self._bytes = {i: token for token, i in ranks.items()} | {i: token.encode() for token, i in special.items()}
        self._special_texts = {i: token for token, i in special.items()}
        self.size = max(self._bytes) + 1

    def encode(self, text: str) -> list[int]:
        return [i for part in cut(text) for i in self._encoding.encode(part, allowed_special="all")]

    def piece(self, token_id: int, first: bool) -> bytes | None:
        return self._bytes.get(token_id)

    def token(self, token_id: int) -> str | None:
        if token_id in self._special_texts:
            return self._special_texts[token_id]
        return None if (token := self._bytes.get(token_id)) is None else "".join(_LETTERS[b] for b in token)

    def token_id(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        return self._ranks.get(letters_to_bytes(token))


def cut(text: str, max_text: int = _MAX_TEXT, max_run: int = _MAX_RUN) -> Iterator[str]:
    """`text` in the parts that are split and merged each by itself: ordinary texts are one part."""
    for begin in range(0, len(text), max_text):
        block = text[begin : begin + max_text]
        start = 0
        for run in _RUNS.finditer(block):
            for place in range(run.start() + max_run, run.end(), max_run):
                yield block[start:place]
                start = place
        yield block[start:]


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with tiktoken.model and tokenizer_config.json."""
    where = folder / "tiktoken.model"
    files = read_tokenizer_files(folder)
    kind = files.config.get("tokenizer_class", _CLASS)
    if kind != _CLASS:
        raise CheckpointError(
            "how this tokenizer splits text is not known here",
            where=f"{files.where}: tokenizer_class",
            found=kind,
            expected=f"{_CLASS} (Kimi)",
            fix="convert it to a tokenizer.json",
        )
    ranks = read_ranks(where)
    special = _special_tokens(len(ranks), files)
    backend = TiktokenBackend(ranks, special, where)
    named, missing = named_ids(backend.token_id, files.named)
    plain = {entry.token_id for entry in files.added if not entry.special}
    also = {i for token in files.also_special if (i := backend.token_id(token)) is not None}
    ids = frozenset((set(special.values()) - plain) | set(named.values()) | also)
    note = f"tiktoken.model, {len(ranks)} tokens and {len(special)} special ids, Kimi's split"
    return Tokenizer(backend, ids, named, files.chat, folder, (note, *files.notes, *missing))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte string -> rank from a tiktoken file: a base64 string and its rank on each line.

    Raises CheckpointError naming the line; also for ranks that are not 0 .. n-1 and for bytes that no token spells.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            found = repr(line[:60].decode("utf-8", "replace"))
            raise CheckpointError(
                "not a base64 string and its rank",
                where=f"{path} line {number}",
                found=found,
                fix="download the file again",
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(
            "ranks must count from 0 without gaps or repeats",
            where=path,
            found=f"{len(ranks)} tokens, highest rank {max(ranks.values(), default=None)}",
        )
    absent = [b for b in range(256) if bytes([b]) not in ranks]
    if absent:
        raise CheckpointError(
            "every byte must be a token", where=path, found=f"{len(absent)} bytes missing, the first is {absent[0]}"
        )
    return ranks


def _special_tokens(base: int, files: TokenizerFiles) -> dict[str, int]:
    named = {entry.token_id: entry.content for entry in files.added}
    low = min(named, default=base)
    if low < base:
        raise CheckpointError(
            "a special token lies among the ranks",
            where=f"{files.where}: added_tokens_decoder",
            found=f"{named[low]!r} with id {low}",
            expected=f"ids from {base} on",
            fix="take tiktoken.model and tokenizer_config.json from the same place",
        )
    size = max(base + RESERVED, max(named, default=0) + 1)
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(base, size)}
    if len(special) != size - base:
        raise CheckpointError("a special token is there twice", where=f"{files.where}: added_tokens_decoder")
    return special
