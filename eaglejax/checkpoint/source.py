"""What a model's name means: a path, a built-in name or a hub id."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eaglejax.checkpoint.builtin import builtin_names, builtin_path
from eaglejax.checkpoint.convert_record import refuse_unfinished
from eaglejax.errors import CheckpointError

log = logging.getLogger("eaglejax")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model"]
TORCH_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine: a folder in Hugging Face format, or one file."""

    path: Path
    kind: Literal["folder", "safetensors", "gguf"]

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer of the checkpoint would lie."""
        return self.path if self.kind == "folder" else self.path.parent


def resolve(name_or_path: Any) -> Source:
    """Finds the checkpoint that a name means; downloads a hub id, or a built-in model not yet in the cache.

    A built-in name wins over a folder of that name in the working directory (write ./NAME for that one), an existing
    path over a hub id. A name of the form WORD/WORD is a hub id only where no folder WORD exists here.

    Raises:
        CheckpointError: nothing is found under that name; says every reading of it that was tried.
    """
    if not isinstance(name_or_path, str | Path):
        raise CheckpointError("not a model name or a path", found=repr(name_or_path)[:80], expected="text or a Path")
    name = str(name_or_path)
    if name in builtin_names() and not isinstance(name_or_path, Path):
        return _local(builtin_path(name))
    if not name.strip():
        raise CheckpointError("an empty model name", expected=f"a path, a hub id or one of {_names()}")
    try:
        path = Path(name_or_path).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError("cannot be looked up as a path", where=name[:200], found=str(error)[:120]) from None
    if there:
        return _local(path)
    if isinstance(name_or_path, Path) or not HUB_ID.fullmatch(name) or path.suffix in (".gguf", ".safetensors"):
        raise CheckpointError(
            "no such file or folder, and no built-in name",
            where=name,
            expected=f"an existing folder or .gguf file, a hub id ORG/NAME, or one of {_names()}",
        )
    return _hub(name, path)


def _names() -> str:
    return ", ".join(builtin_names())


def _local(path: Path) -> Source:
    if path.is_dir():
        # before anything in it is missed
        refuse_unfinished(path)
        return Source(path, "folder")
    if path.suffix == ".gguf":
        return Source(path, "gguf")
    if path.suffix == ".safetensors":
        return Source(path, "safetensors")
    raise CheckpointError(
        "is no checkpoint by its name",
        where=path,
        expected="a folder, a .gguf file or a .safetensors file",
        fix=f"give the folder that holds it: {path.parent}"
        if path.suffix in (".bin", ".json", ".pt", ".pth")
        else None,
    )


def _hub(name: str, path: Path) -> Source:
    """A hub id through huggingface_hub where that is installed."""
    local = f"./{name.split('/')[1]}"
    command = f"pip install huggingface_hub && hf download {name} --local-dir {local}"
    if path.parent.is_dir():
        raise CheckpointError(
            f"no such folder (in {path.parent.resolve()}, which exists)",
            where=name,
            fix=f"correct the path; if the hub's model of that name is meant, run '{command}' and give {local}",
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(
            "no such folder here; read as a hub id it needs the package huggingface_hub, which is not installed",
            where=name,
            fix=f"correct the path, or run '{command}' and give {local}",
        )
    log.info("%s: no such folder here, so it is read as a hub id", name)
    download = importlib.import_module("huggingface_hub").snapshot_download
    # files at the top only: folders hold other formats of the same weights
    try:
        folder = Path(download(name, allow_patterns=PATTERNS, ignore_patterns=["*/*"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(name, allow_patterns=PATTERNS + TORCH_PATTERNS, ignore_patterns=["*/*"]))
    except Exception as e:
        reason = " ".join(str(e).split())[:300]
        raise CheckpointError(
            f"no such folder here, and as a hub id it cannot be downloaded ({type(e).__name__}: {reason})",
            where=name,
            fix=f"correct the path or the id, or download it where there is a network: {command}",
        ) from e
    return Source(folder, "folder")
