"""tokenizer.json: the `tokenizers` library's own format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from eaglejax.checkpoint.json_file import read_json
from eaglejax.errors import CheckpointError
from eaglejax.text.backend import LibraryBackend
from eaglejax.text.interface import Tokenizer
from eaglejax.text.tokenizer_files import AddedTokenEntry, TokenizerFiles, read_tokenizer_files


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with tokenizer.json; tokenizer_config.json and the chat template are read where they
    are there."""
    where = folder / "tokenizer.json"
    stored = read_json(where)
    try:
        library = tokenizers.Tokenizer.from_file(str(where))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(
            "the tokenizers library cannot read this file",
            where=where,
            found=str(error),
            fix="download the file again, or update the tokenizers package",
        ) from None
    _check_added(library, stored, where)
    files = read_tokenizer_files(folder)
    _add_declared(library, files)
    backend = LibraryBackend(library, where)
    special = {t["id"] for t in stored.get("added_tokens") or () if t.get("special")}
    for entry in files.added:
        # tokenizer_config.json has the last word on what is special
        (special.add if entry.special else special.discard)(entry.token_id)
    return finish(backend, special, files, folder, f"tokenizer.json, {backend.size} tokens")


def finish(
    backend: LibraryBackend, special: Iterable[int], files: TokenizerFiles, where: object, note: str
) -> Tokenizer:
    """A tokenizer whose named tokens (EOS, ...) are special and recognised in text."""
    named, missing = named_ids(backend.token_id, files.named)
    backend.recognise([*files.named.values(), *files.also_special])
    also = [i for t in files.also_special if (i := backend.token_id(t)) is not None]
    ids = frozenset(special) | set(named.values()) | set(also)
    return Tokenizer(backend, frozenset(ids), named, files.chat, where, (note, *files.notes, *missing))


def named_ids(token_id: Any, named: Mapping[str, str]) -> tuple[dict[str, int], list[str]]:
    """Ids of named tokens, and a note for each that the vocabulary does not hold."""
    ids = {name: i for name, token in named.items() if (i := token_id(token)) is not None}
    return ids, [f"{name} {named[name]!r} is not in the vocabulary: passed over" for name in named if name not in ids]


def _check_added(library: tokenizers.Tokenizer, stored: Mapping[str, Any], where: Path) -> None:
    """The library numbers added tokens as it goes: make sure that they got the ids the file gives."""
    for token in stored.get("added_tokens") or ():
        if library.token_to_id(token["content"]) != token["id"]:
            raise CheckpointError(
                f"added token {token['content']!r} does not get its id",
                where=where,
                found=f"id {library.token_to_id(token['content'])}",
                expected=f"id {token['id']} as its entry in added_tokens says",
            )


def _add_declared(library: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Adds tokens that only tokenizer_config.json declares, and checks the ids of all that it declares."""
    missing = [entry for entry in files.added if library.token_to_id(entry.content) is None]
    for entry in missing:
        library.add_tokens([tokenizers.AddedToken(entry.content, normalized=False, special=entry.special)])
    for entry in files.added:
        _check_declared(library, entry, files.where)


def _check_declared(library: tokenizers.Tokenizer, entry: AddedTokenEntry, where: Path) -> None:
    found = library.token_to_id(entry.content)
    if found != entry.token_id:
        raise CheckpointError(
            "tokenizer_config.json and tokenizer.json disagree on a token's id",
            where=f"{where}: added_tokens_decoder",
            found=f"{entry.content!r} has id {found} in the vocabulary",
            expected=f"id {entry.token_id}",
            fix="take both files from the same place",
        )
