"""Loads a target: config and headers checked first, then every weight filled in its place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from eaglejax.checkpoint.choice import choose, packings, quantisable
from eaglejax.checkpoint.difference_base import difference_folder
from eaglejax.checkpoint.json_file import read_config, read_generation_config
from eaglejax.checkpoint.quantised import Quantisation, find_quantisation
from eaglejax.checkpoint.reader import CheckpointReader, open_checkpoint
from eaglejax.checkpoint.streaming import fill
from eaglejax.checkpoint.weight_plan import Recipe, Stems, target_plan
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.packed import pack
from eaglejax.models.target import Target
from eaglejax.models.target_config import TargetReading, read_target_config

SECTION = "target"
DTYPES = ("float32", "bfloat16")
# tables that are computed here, and masks of old releases
BUFFERS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.(masked_bias|attn\.bias)$")


def load_target(folder: str | Path, *, dtype: DTypeLike = "float32", report: LoadReport | None = None) -> Target:
    """A target from a Hugging Face folder, a .safetensors file beside its config.json, a difference beside the config that
    names its base, or a .gguf file.

    Arguments:
        dtype: "float32" or "bfloat16"; all weights are cast to it except routers, which stay float32.
        report: what was read, cast, skipped and assumed is noted there.

    Raises:
        CheckpointError, ConfigError: before anything is allocated, naming file, tensor or key, what was found and
        what was expected.
    """
    report = LoadReport() if report is None else report
    name = str(jnp.dtype(dtype))
    if name not in DTYPES:
        raise ConfigError("dtype is not supported", found=name, expected=" or ".join(DTYPES))
    reading, reader = open_target(folder)
    return build_target(reading, reader, name, report)


def open_target(folder: str | Path) -> tuple[TargetReading, CheckpointReader]:
    """Config and headers of a target, read and checked; no weight is touched. Arguments and errors as in
    `load_target`."""
    path = Path(folder)
    base = path if path.is_dir() else path.parent
    where, reader = path if path.suffix == ".gguf" else base / "config.json", None
    if path.suffix == ".gguf" or difference_folder(path) is not None:
        reader = open_checkpoint(path)
        values, generation = reader.hf_config or {}, {}
    else:
        # the config first: an unknown family is the better message where both are wrong
        values, generation = read_config(base), read_generation_config(base)
    reading = read_target_config(values, where=where, generation=generation)
    find_quantisation(reading.quantisation)
    return reading, open_checkpoint(path) if reader is None else reader


def check_target(reading: TargetReading, reader: CheckpointReader) -> dict[str, Recipe]:
    """The tensors that every parameter is made of, each checked against the config by name, shape and dtype."""
    plan = target_plan(reading.config, reading.family, _stems(reading, reader))
    return choose(plan, reader, find_quantisation(reading.quantisation))


def build_target(
    reading: TargetReading,
    reader: CheckpointReader,
    dtype: str,
    report: LoadReport,
    mesh: Mesh | None = None,
    build: Callable[[], Target] | None = None,
    abstract: Target | None = None,
) -> Target:
    """The target of a config that was read, filled from a reader.

    Arguments:
        mesh: where the leaves are laid by their `mesh_axes` and `repeats`; each process reads what its devices hold.
        build: makes the target of one device, called under `nnx.eval_shape`; by default the whole of it. Its
            parameters may be split along any axis that has a mesh axis. Those that the checkpoint holds quantised
            become `PackedWeight`s of the same split.
        abstract: such a target already made, by `abstract_target`; in place of `build`.
    """
    stems = _stems(reading, reader)
    chosen = check_target(reading, reader)
    _report(reading, reader, chosen, dtype, report)
    _sort_leftovers(reading, reader, chosen, stems, report)
    target = abstract or abstract_target(build or (lambda: Target(reading.config, dtype=dtype)), chosen)
    report.note(SECTION, str(fill(target, chosen, reader, mesh)))
    return target


def abstract_target(build: Callable[[], Target], chosen: Mapping[str, Recipe]) -> Target:
    """The abstract target that `fill` fills: `build`'s, with a `PackedWeight` for every quantised weight."""

    def packed() -> Target:
        target = build()
        pack(target, packings(chosen))
        return target

    return nnx.eval_shape(packed)


def _stems(reading: TargetReading, reader: CheckpointReader) -> Stems:
    candidates = reading.family.prefixes
    for prefix, head_prefix in candidates:
        if f"{prefix}embed_tokens.weight" in reader.tensors:
            # transformers 5.24 saves the layers of kimi_k25 under the name that belongs to its vision tower
            found = any(name.startswith(f"{prefix}blocks.0.") for name in reader.tensors)
            return Stems(prefix, head_prefix, f"{prefix}{'blocks' if found else 'layers'}.")
    raise CheckpointError(
        "the embedding is missing",
        where=reader.path,
        found=f"{len(reader.tensors)} tensors, the first {min(reader.tensors, default='none')!r}",
        expected=" or ".join(f"{prefix}embed_tokens.weight" for prefix, _ in candidates),
    )


def _report(
    reading: TargetReading, reader: CheckpointReader, chosen: dict[str, Recipe], dtype: str, report: LoadReport
) -> None:
    config = reading.config
    used = [part for recipe in chosen.values() for part in recipe]
    stored = sorted({reader.tensors[part.name].stored for part in used if part.packing is None and part.scales is None})
    report.note(
        SECTION, f"{config.family}, {config.num_layers} layers, hidden {config.hidden_size}, from {reader.path}"
    )
    for line in reader.notes:
        report.note(SECTION, line)
    report.note(SECTION, f"weights {', '.join(stored)} in the file, {dtype} here (routers float32)")
    _report_quantised(find_quantisation(reading.quantisation), chosen, dtype, report)
    if config.tie_embeddings:
        report.note(SECTION, "the head is the embedding (tied)")
    for part in used:
        rows = reader.tensors[part.name].shape[0] if part.padded else 0
        if rows > config.vocab_size:
            report.note(
                SECTION, f"{part.name}: {rows} rows, those beyond vocab_size {config.vocab_size} dropped as padding"
            )
    for line in reading.assumed:
        report.note(SECTION, f"assumed: {line}")
    if reading.unread:
        report.note(SECTION, f"config keys that are not used: {', '.join(reading.unread)}")
    if reading.doubtful:
        report.warn(
            f"config keys of the target that EagleJax does not know and does not use: {', '.join(reading.doubtful)}."
            " If the model needs them, its answers are wrong"
        )


def _report_quantised(
    quantisation: Quantisation | None, chosen: dict[str, Recipe], dtype: str, report: LoadReport
) -> None:
    """What stays quantised, what the config would have quantised and is plain, and how the products are rounded."""
    if quantisation is None:
        return
    counts = Counter(part.packing.kind for recipe in chosen.values() for part in recipe if part.packing is not None)
    for kind, count in counts.items():
        report.note(SECTION, f"{count} tensors stay {kind} on the device, widened where they are used")
    rounding = "not rounded" if dtype == "float32" else f"rounded to {dtype}"
    report.note(SECTION, f"a quantised weight times its scale is computed in float32 and {rounding}")
    for note in quantisation.notes:
        report.note(SECTION, note)
    bare = [
        part.name
        for leaf, recipe in chosen.items()
        for part in recipe
        if part.packing is None and part.scales is None and quantisable(leaf)
        if quantisation.scheme(part.name.removesuffix(".weight")) is not None
    ]
    if bare:
        some = _some(bare)
        report.note(
            SECTION, f"not quantised in the files, though the config does not except them: {len(bare)} ({some})"
        )


def _sort_leftovers(
    reading: TargetReading,
    reader: CheckpointReader,
    chosen: dict[str, Recipe],
    stems: Stems,
    report: LoadReport,
) -> None:
    """Lists the tensors that are not needed; refuses those that would change the forward pass."""
    used = {name for recipe in chosen.values() for part in recipe for name in (part.name, *part.beside)}
    config, head = reading.config, f"{stems.head}lm_head.weight"
    groups: dict[str, list[str]] = {}
    unknown = []
    for name in sorted(reader.tensors.keys() - used):
        layer = re.match(re.escape(stems.layers) + r"(\d+)\.", name)
        index = int(layer[1]) if layer else -1
        prediction = layer is not None and f"{layer[0]}eh_proj.weight" in reader.tensors
        if name.startswith(reading.family.skipped):
            groups.setdefault("vision", []).append(name)
        elif name.startswith("mtp.") or (prediction and index >= config.num_layers):
            groups.setdefault("multi-token prediction", []).append(name)
        elif BUFFERS.search(name):
            groups.setdefault("computed here", []).append(name)
        elif name == head and config.tie_embeddings:
            _refuse_untied(reader, f"{stems.model}embed_tokens.weight", head)
            groups.setdefault("copy of the tied embedding", []).append(name)
        else:
            unknown.append(name)
    for kind, names in groups.items():
        report.note(SECTION, f"skipped, {kind}: {len(names)} tensors ({_some(names)})")
    if unknown:
        info = reader.tensors[unknown[0]]
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in the model that config.json describes",
            where=info.file,
            found=_some([f"{name} {list(reader.tensors[name].shape)}" for name in unknown]),
            fix="they would change the forward pass; check the config (biases, norms, number of layers)",
        )


def _refuse_untied(reader: CheckpointReader, embedding: str, head: str) -> None:
    if not np.array_equal(reader.read(embedding), reader.read(head)):
        raise CheckpointError(
            "the config says that head and embedding are tied, but the checkpoint holds two different tensors",
            where=reader.tensors[head].file,
            found=f"{embedding} and {head}",
            fix='set "tie_word_embeddings": false in config.json to use both',
        )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
