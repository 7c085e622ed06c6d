"""Finds and loads the tokenizer of a checkpoint, whatever file it comes in. No code from a checkpoint is ever run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.errors import CheckpointError
from eaglejax.text import gguf_tokenizer, hf_tokenizer, kimi_tokenizer
from eaglejax.text.interface import Tokenizer

__all__ = ["Tokenizer", "has_tokenizer", "load_tokenizer"]


def has_tokenizer(source: Any, reader: Any = None) -> bool:
    """Whether `load_tokenizer` would find a tokenizer to load: models without one take token ids only."""
    if _gguf(source, reader) is not None:
        return True
    folder = _folder(source, reader)
    return folder is not None and any((folder / name).is_file() for name in ("tokenizer.json", "tiktoken.model"))


def load_tokenizer(source: Any, reader: Any = None) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Arguments:
        source: a checkpoint folder holding tokenizer.json (preferred) or tiktoken.model; or a checkpoint reader, or
            the dict of tokenizer entries of a GGUF file.
        reader: a checkpoint reader; where its `gguf_tokenizer` or its `text_folder` is set, that is used.

    Raises CheckpointError naming the file at fault, or the files found where there is no tokenizer.
    """
    gguf = _gguf(source, reader)
    if gguf is not None:
        where = getattr(reader, "path", None) or getattr(source, "path", None) or "GGUF"
        return gguf_tokenizer.load(gguf, where)
    folder = _folder(source, reader)
    if folder is None or not folder.is_dir():
        raise CheckpointError("not a checkpoint folder", where="tokenizer", found=repr(source))
    if (folder / "tokenizer.json").is_file():
        return hf_tokenizer.load(folder)
    if (folder / "tiktoken.model").is_file():
        return kimi_tokenizer.load(folder)
    raise _not_found(folder)


def _gguf(source: Any, reader: Any) -> Mapping[str, Any] | None:
    if isinstance(source, Mapping):
        return source
    for holder in (reader, source):
        entries = getattr(holder, "gguf_tokenizer", None)
        if entries is not None:
            return entries
    return None


def _folder(source: Any, reader: Any) -> Path | None:
    for holder in (reader, source):
        folder = getattr(holder, "text_folder", None)
        if folder is not None:
            return folder
    path = source if isinstance(source, (str, Path)) else getattr(source, "path", None)
    return None if path is None else Path(path)


def _not_found(folder: Path) -> CheckpointError:
    others = sorted(
        p.name for p in folder.iterdir() if p.name.startswith(("tokenizer", "vocab", "merges", "special_tokens"))
    )
    fix = "copy tokenizer.json and tokenizer_config.json from the model's page into the folder"
    if "tokenizer.model" in others or "vocab.json" in others:
        fix += "; where the page has none, transformers' AutoTokenizer.save_pretrained writes one"
    return CheckpointError(
        "no tokenizer that can be read",
        where=folder,
        found=", ".join(others) or "none",
        expected="tokenizer.json or tiktoken.model",
        fix=fix,
    )
