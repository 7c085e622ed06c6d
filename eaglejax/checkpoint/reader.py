"""`open_checkpoint`: any checkpoint on disk as one table of tensors, every file checked before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from eaglejax.checkpoint import gguf_file, orbax_folder, torch_bin
from eaglejax.checkpoint.convert_record import refuse_unfinished
from eaglejax.checkpoint.difference_base import difference_folder, find_base
from eaglejax.checkpoint.json_file import read_index
from eaglejax.checkpoint.pointer import FETCH_AGAIN
from eaglejax.checkpoint.safetensors_file import read_header
from eaglejax.checkpoint.tensors import DTYPES, CheckpointReader, TensorInfo
from eaglejax.errors import CheckpointError

__all__ = ["DTYPES", "CheckpointReader", "TensorInfo", "open_checkpoint"]

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Opens a Hugging Face folder, an Orbax folder that `eaglejax convert` made, a difference beside the config that names
    its base, a .safetensors file or a .gguf file; reads headers only.

    A folder may hold model.safetensors, shards with or without model.safetensors.index.json, a single .safetensors file
    of another name, or, where it has none of these, pytorch_model.bin (whole or with its index).

    Raises:
        CheckpointError: a file is missing, incomplete, corrupt or contradicts another; says which, and what to do.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError("no such file or folder", where=path)
    if path.suffix == ".gguf":
        return gguf_file.open_gguf(path)
    if path.suffix == ".safetensors":
        return _open_difference(path) or _join(path, [path])
    if path.suffix in (".bin", ".pt", ".pth"):
        return torch_bin.open_torch(path, [path])
    raise CheckpointError(
        "is no checkpoint by its name", where=path, expected="a folder, a .safetensors file or a .gguf file"
    )


def _open_folder(folder: Path) -> CheckpointReader:
    refuse_unfinished(folder)
    if orbax_folder.is_orbax_folder(folder):
        return orbax_folder.open_orbax(folder)
    if (difference := _open_difference(folder)) is not None:
        return difference
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() and index.exists() and set(read_index(index).values()) != {single.name}:
        raise CheckpointError(
            "holds two checkpoints",
            where=folder,
            found=f"{single.name} and {index.name}, which names other files",
            fix="remove the one that does not belong there",
        )
    if single.exists():
        return _join(folder, [single])
    if index.exists():
        weight_map = read_index(index)
        reader = _join(folder, _listed(index, weight_map))
        _check_index(index, weight_map, reader.tensors)
        return reader
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _join(folder, _unlisted(folder, files))
    return _open_other(folder)


def _open_difference(path: Path) -> CheckpointReader | None:
    """The difference that a folder or its file of weights is, over its base; None where it is none."""
    folder = difference_folder(path)
    if folder is None:
        return None
    # these read configs as models do, which takes jax
    from eaglejax.checkpoint.difference_compose import compose
    from eaglejax.checkpoint.difference_reader import DifferenceReader

    name, source = find_base(folder)
    base = open_checkpoint(source.path)
    return DifferenceReader(folder, compose(folder, name, source, base), source, base)


def _open_other(folder: Path) -> CheckpointReader:
    """A folder without safetensors."""
    single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    if single.exists():
        return torch_bin.open_torch(folder, [single])
    if index.exists():
        weight_map = read_index(index)
        reader = torch_bin.open_torch(folder, _listed(index, weight_map))
        _check_index(index, weight_map, reader.tensors)
        return reader
    gguf = sorted(folder.glob("*.gguf"))
    raise CheckpointError(
        "holds no weights",
        where=folder,
        found=", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "an empty folder",
        expected="model.safetensors, or shards with model.safetensors.index.json",
        fix=f"give the file itself: {gguf[0]}" if gguf else "download the whole checkpoint",
    )


def _join(path: Path, files: Iterable[Path]) -> CheckpointReader:
    """One table over several safetensors files, none of which may repeat a tensor of another."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, notes = read_header(file)
        for name in found.keys() & tensors.keys():
            raise CheckpointError(
                f"tensor {name!r} is in two files",
                where=path,
                found=f"{tensors[name].file.name} and {file.name}",
                fix="remove the file that does not belong to the checkpoint",
            )
        tensors |= found
        metadata |= notes
    return CheckpointReader(path, tensors, metadata)


def _listed(index: Path, weight_map: dict[str, str]) -> list[Path]:
    """The shards that an index names; all must be there."""
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise CheckpointError(
            f"{len(missing)} of the {len(shards)} files that it names are missing: {_some(missing)}",
            where=index,
            fix="download the missing files into the same folder",
        )
    return shards


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """The index and the shards must agree on where every tensor lies."""
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"says that tensor {name!r} is in {shard}",
                where=index,
                found=f"it in {tensors[name].file.name}" if name in tensors else "it in no file",
                fix=f"{FETCH_AGAIN}, shards and index from the same version of the checkpoint",
            )
    if extra := sorted(tensors.keys() - weight_map.keys()):
        raise CheckpointError(
            f"lacks {len(extra)} tensors that its files hold: {_some(extra)}",
            where=index,
            fix=f"{FETCH_AGAIN}, shards and index from the same version of the checkpoint",
        )


def _unlisted(folder: Path, files: list[Path]) -> list[Path]:
    """The files of a folder without an index: all shards of one set, or a single file."""
    shards = {file: match for file in files if (match := SHARD.fullmatch(file.name))}
    if not shards:
        if len(files) > 1:
            raise CheckpointError(
                "several .safetensors files, no index and no model.safetensors",
                where=folder,
                found=_some([file.name for file in files]),
                fix="keep one of them, or give the file itself",
            )
        if files[0].name.startswith("adapter_"):
            raise CheckpointError(
                "holds only an adapter (LoRA), not a whole model",
                where=files[0],
                fix="merge it into its base model first, and give the folder of the merged model",
            )
        return files
    sets = {(match["stem"], int(match["count"])) for match in shards.values()}
    if len(sets) > 1:
        raise CheckpointError(
            "shards of several checkpoints and no index",
            where=folder,
            found=_some([file.name for file in shards]),
            fix="keep the shards of one checkpoint",
        )
    stem, count = sets.pop()
    there = {int(match["number"]) for match in shards.values()}
    if missing := [f"{stem}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1) if n not in there]:
        raise CheckpointError(
            f"{len(missing)} of {count} shards are missing: {_some(missing)}",
            where=folder,
            fix="download the missing files into the same folder",
        )
    return list(shards)


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
