"""The tokenizer inside a GGUF file (byte-level BPE, `tokenizer.ggml.model` = "gpt2")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from eaglejax.errors import CheckpointError
from eaglejax.text.backend import LibraryBackend
from eaglejax.text.chat import ChatTemplate
from eaglejax.text.hf_tokenizer import named_ids
from eaglejax.text.interface import Tokenizer

# token_type values of the GGUF format
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit by itself, then GPT-2's split. Without the first step ids differ before digits."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# by `tokenizer.ggml.pre`
_SPLITS = {"smollm": _smollm, "gpt-2": _gpt2, "llama-bpe": _llama3}
# a whole word of the vocabulary is taken as it is, whatever the merges say
_IGNORE_MERGES = {"llama-bpe"}

_ALIASES = {
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "unk_id": "unknown_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_id": "padding_token_id",
    "pad_token_id": "padding_token_id",
}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load(entries: Mapping[str, Any], where: object = "GGUF") -> Tokenizer:
    """A tokenizer from a GGUF file's `tokenizer.*` entries (names with or without `tokenizer.ggml.`).

    Needs tokens [v] and merges; takes model, pre, token_type [v], bos/eos/unknown/padding_token_id, chat_template.
    Raises CheckpointError naming the entry that is missing or not supported.
    """
    entries = {_short(key): value for key, value in entries.items()}
    model = entries.get("model")
    if model != "gpt2":
        raise CheckpointError(
            "this kind of GGUF tokenizer is not supported",
            where=f"{where}: tokenizer.ggml.model",
            found=model,
            expected="gpt2",
        )
    pre = entries.get("pre")
    if pre not in _SPLITS:
        raise CheckpointError(
            "how this tokenizer splits text is not known here",
            where=f"{where}: tokenizer.ggml.pre",
            found=repr(pre),
            expected=", ".join(_SPLITS),
            fix="use the model's folder in HF format with its tokenizer.json",
        )
    tokens = _texts(entries, "tokens", where)
    types = list(entries.get("token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(
            "must hold one type per token",
            where=f"{where}: tokenizer.ggml.token_type",
            found=len(types),
            expected=len(tokens),
        )
    library = _library(tokens, types, _texts(entries, "merges", where), pre, where)
    names = {
        name: tokens[i]
        for name, key in _NAMED.items()
        if (i := _token_id(entries, key, len(tokens), where)) is not None
    }
    backend = LibraryBackend(library, where)
    backend.recognise(names.values())
    named, _ = named_ids(backend.token_id, names)
    special = {i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)} | set(named.values())
    template = entries.get("chat_template")
    chat = None if template is None else ChatTemplate(template, f"{where}: tokenizer.chat_template", names)
    note = f"GGUF, {backend.size} tokens, split {pre!r}"
    return Tokenizer(
        backend,
        frozenset(special),
        named,
        chat,
        where,
        (note, "no chat template" if chat is None else "chat template from GGUF"),
    )


def _short(key: str) -> str:
    key = key.removeprefix("tokenizer.").removeprefix("ggml.")
    return _ALIASES.get(key, key)


def _texts(entries: Mapping[str, Any], key: str, where: object) -> list[str]:
    values = entries.get(key)
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(isinstance(v, str) for v in values):
        found = "nothing" if values is None else type(values).__name__
        raise CheckpointError("must be a list of texts", where=f"{where}: tokenizer.ggml.{key}", found=found)
    return list(values)


def _token_id(entries: Mapping[str, Any], key: str, size: int, where: object) -> int | None:
    value = entries.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < size:
        raise CheckpointError(
            "no such token", where=f"{where}: tokenizer.ggml.{key}", found=value, expected=f"an id below {size}"
        )
    return int(value)


def _library(tokens: list[str], types: list[int], merges: list[str], pre: str, where: object) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError("a token is there twice", where=f"{where}: tokenizer.ggml.tokens", found=repr(twice))
    pairs = []
    for n, merge in enumerate(merges):
        left, gap, right = merge.partition(" ")
        if not gap or not all(part in vocab for part in (left, right, left + right)):
            raise CheckpointError(
                "a merge of tokens that are not in the vocabulary",
                where=f"{where}: tokenizer.ggml.merges[{n}]",
                found=repr(merge),
            )
        pairs.append((left, right))
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _IGNORE_MERGES))
    library.pre_tokenizer = _SPLITS[pre]()  # pyright: ignore[reportAttributeAccessIssue]
    library.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    added = lambda wanted, special: [
        tokenizers.AddedToken(token, normalized=False, special=special)
        for token, kind in zip(tokens, types, strict=True)
        if kind in wanted
    ]
    library.add_special_tokens(added((UNKNOWN, CONTROL), True))
    library.add_tokens(added((USER_DEFINED,), False))
    return library
