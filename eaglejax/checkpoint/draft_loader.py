"""Loads an EAGLE-3 draft of any released format: everything is checked from headers and small tables first, then the
weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Float, Int

from eaglejax.checkpoint.draft_names import DraftTensors, read_names
from eaglejax.checkpoint.draft_weights import check_shapes, fill, read_parameter, sources
from eaglejax.checkpoint.json_file import read_config
from eaglejax.checkpoint.reader import CheckpointReader, open_checkpoint
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.checkpoint.streaming import place_whole
from eaglejax.checkpoint.vocab_map import check_vocabulary, map_vocabulary
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import MANIFEST_KEY, Capture, CaptureReading
from eaglejax.models.config import DraftConfig, TargetConfig
from eaglejax.models.draft import Draft, layer_attention
from eaglejax.models.draft_config import TargetFacts, read_draft_config
from eaglejax.models.draft_formats import FlatConfig, flatten, replace_keys
from eaglejax.models.draft_keys import check_keys
from eaglejax.models.layers import leaves
from eaglejax.models.target import Target

EMBEDDING, HEAD, TARGET_NORM = "embedding.weight", "head.weight", "fusion.target_norm.scale"


@dataclass(frozen=True)
class DraftPlan:
    """A draft that was checked and not yet read.

    `borrowed`: parameters that come from the target. `tied`: the head is the draft's own embedding.
        `score_temperature`: one number per tree level from our own manifest, or empty.
    """

    reader: CheckpointReader
    tensors: DraftTensors
    config: DraftConfig
    capture: CaptureReading
    target_ids: Int[np.ndarray, " w"]
    borrowed: frozenset[str]
    tied: bool
    score_temperature: tuple[float, ...] = ()


@dataclass(frozen=True)
class LoadedDraft:
    """A draft with all its weights, and how its captures were read."""

    draft: Draft
    capture: CaptureReading
    config: DraftConfig
    score_temperature: tuple[float, ...] = ()


def read_draft(
    folder: str | Path | Source,
    *,
    dtype: DTypeLike,
    target: Target | None = None,
    target_embedding: Float[Array, "v d"] | Float[np.ndarray, "v d"] | None = None,
    capture: Capture = "auto",
    overrides: Mapping[str, Any] | None = None,
    report: LoadReport,
    mesh: Mesh | None = None,
) -> LoadedDraft:
    """Load a draft.

    Arguments:
        folder: a folder in Hugging Face form, a built-in name, or a hub id.
        dtype: compute dtype; weights are converted to it at load.
        target: the loaded target, whose embedding or head is borrowed where the file has none.
        target_embedding: [v, d], in place of a target.
        capture: how the config numbers capture layers, or the boundaries (`models.capture.read_capture`).
        overrides: config keys to replace, e.g. {"rope_theta": 10000.0} or {"norm_output": False}.
        report: gets every choice in plain words.
        mesh: the draft lies whole on each of its devices; None: one device.

    Raises CheckpointError or ConfigError before any weight is read.
    """
    facts = TargetFacts()
    if target is not None:
        facts = facts_of(target.config)
    elif target_embedding is not None:
        facts = TargetFacts(vocab_size=int(target_embedding.shape[0]))
    plan = inspect_draft(folder, target=facts, capture=capture, overrides=overrides, report=report)
    return load_plan(plan, dtype=dtype, target=target, target_embedding=target_embedding, report=report, mesh=mesh)


def facts_of(target: TargetConfig) -> TargetFacts:
    """What a draft must know of a target, from its config alone."""
    return TargetFacts(target.vocab_size, target.hidden_size, target.num_layers, target.norm_eps)


def inspect_draft(
    folder: str | Path | Source,
    *,
    target: TargetFacts,
    capture: Capture = "auto",
    overrides: Mapping[str, Any] | None = None,
    report: LoadReport,
) -> DraftPlan:
    """Check a draft against its target without reading a weight; arguments and errors as in `read_draft`.

    Meant to run before the target's weights are read, so that a wrong pair is refused at once.
    """
    source = folder if isinstance(folder, Source) else resolve(folder)
    reader = open_checkpoint(source.path)
    config = reader.hf_config if reader.hf_config is not None else read_config(source.folder)
    where = source.path if reader.hf_config is not None else source.folder / "config.json"
    if overrides:
        config = replace_keys(config, overrides)
        report.note("draft", "overridden: " + ", ".join(f"{key} = {value!r}" for key, value in overrides.items()))
    flat = flatten(config, reader.tensors, where)
    report.note("draft", f"{source.path}: EAGLE-3 draft in {flat.name} format")
    _check_quantisation(config, where)
    for note in flat.notes:
        report.note("draft", note)
    tensors = read_names(reader.tensors, source.path)
    unknown_keys = check_keys(flat, reader.tensors, where)
    reading = read_draft_config(flat, tensors, target, capture=capture, where=where, report=report)
    ids = _vocabulary(reader, tensors, reading.config, target, report, flat.top.get("d2t"))
    borrowed, tied = _borrowed(flat, reading.config, target, source.path)
    skeleton = nnx.eval_shape(lambda: Draft(reading.config, dtype=jnp.float32))
    check_shapes(skeleton, tensors, borrowed | ({HEAD} if tied else set()), source.path)
    _report(flat, tensors, reading.config, reading.capture, unknown_keys, report)
    temperature = _score_temperature(flat, where)
    return DraftPlan(reader, tensors, reading.config, reading.capture, ids, frozenset(borrowed), tied, temperature)


def _check_quantisation(config: Mapping[str, Any], where: object) -> None:
    """Refuse methods whose weights would be read as something else."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
    if method not in (None, "compressed-tensors", "fp8"):
        raise ConfigError(
            "a quantisation of the draft that cannot be read",
            where=f"{where}: quantization_config.quant_method",
            found=repr(method),
            expected="compressed-tensors or fp8 with scales per row or per tensor, or no quantisation",
        )


def load_plan(
    plan: DraftPlan,
    *,
    dtype: DTypeLike,
    target: Target | None = None,
    target_embedding: Float[Array, "v d"] | Float[np.ndarray, "v d"] | None = None,
    report: LoadReport,
    mesh: Mesh | None = None,
    build: Callable[[], Draft] | None = None,
    have: Mapping[str, Any] | None = None,
) -> LoadedDraft:
    """Read the weights of a checked draft; borrowed ones are the target's own arrays.

    Arguments:
        mesh: where the leaves are laid by their `mesh_axes`, by default whole on every device; borrowed arrays are
            then copied from the target's, which may be split.
        build: makes the draft of one device, called under `nnx.eval_shape`; by default the whole of it.
        have: parameters that are on the devices already, by path, as `leaves` of another wiring of the same file gives them.
    """
    config, where = plan.config, plan.reader.path
    have = have or {}
    borrowed = plan if not have else replace(plan, borrowed=plan.borrowed - frozenset(have))
    values: dict[str, Any] = _lend(borrowed, dtype, target, target_embedding, report)
    draft = nnx.eval_shape(build or (lambda: Draft(config, dtype=dtype)))
    plans, variables = sources(config), leaves(draft)
    for path in sorted(variables):
        if path in have:
            values[path] = have[path][...]
            continue
        if path not in values and not (plan.tied and path == HEAD):
            values[path] = read_parameter(plan.reader, plan.tensors, plans[path], dtype)
        if path in values:
            values[path] = place_whole(values[path], variables[path], mesh)
    if plan.tied:
        values[HEAD] = values[EMBEDDING]
    fill(draft, {path: value for path, value in values.items() if path in variables})
    draft.target_ids.set_value(place_whole(plan.target_ids, draft.target_ids, mesh))
    stored = sorted({info.dtype for name, info in plan.tensors.infos.items() if name not in ("d2t", "t2d")})
    report.note("draft", f"{where.name}: weights stored as {', '.join(stored)}, computed in {jnp.dtype(dtype).name}")
    return LoadedDraft(draft, plan.capture, config, plan.score_temperature)


def _vocabulary(
    reader: CheckpointReader,
    tensors: DraftTensors,
    config: DraftConfig,
    target: TargetFacts,
    report: LoadReport,
    meaning: str | None,
) -> Int[np.ndarray, " w"]:
    where, vocab = reader.path, target.vocab_size or config.vocab_size
    if config.own_embedding:
        check_vocabulary(config.vocab_size, vocab, f"{where}: embed_tokens.weight", "rows")
    tables = [reader.read(tensors.infos[name].name) if name in tensors.infos else None for name in ("d2t", "t2d")]
    for name, table in zip(("d2t", "t2d"), tables, strict=True):
        if table is not None and table.ndim != 1:
            raise CheckpointError(
                "is misshapen", where=f"{where}: {name}", found=list(table.shape), expected="one axis"
            )
    return map_vocabulary(
        tables[0],
        tables[1],
        draft_vocab=config.draft_vocab_size,
        target_vocab=vocab,
        where=where,
        report=report,
        meaning=meaning,
    )


def _borrowed(flat: FlatConfig, config: DraftConfig, target: TargetFacts, where: Path) -> tuple[set[str], bool]:
    """What the draft's file does not hold and the target must lend; refused where the widths differ."""
    missing = [] if config.own_embedding else [(EMBEDDING, "embed_tokens.weight")]
    tied = not config.own_head and config.own_embedding and flat.layer.get("tie_word_embeddings") is True
    if tied and config.draft_vocab_size != config.vocab_size:
        raise ConfigError(
            "a tied head is as tall as the embedding",
            where=f"{where}: draft_vocab_size",
            found=config.draft_vocab_size,
            expected=config.vocab_size,
        )
    if not config.own_head and not tied:
        missing.append((HEAD, "lm_head.weight"))
    width = config.target_hidden_size if target.hidden_size is None else target.hidden_size
    for _, name in missing:
        if config.hidden_size != width:
            raise CheckpointError(
                f"the draft's file has no {name}, and the target's is of another width",
                where=where,
                found=f"hidden_size {config.hidden_size} in the draft, {width} in the target",
                fix=f"use the file that holds {name}",
            )
    if config.target_norm_eps is not None:
        missing.append((TARGET_NORM, "the target's final norm"))
    return {path for path, _ in missing}, tied


def _lend(
    plan: DraftPlan, dtype: DTypeLike, target: Target | None, table: Any, report: LoadReport
) -> dict[str, jax.Array]:
    """The borrowed parameters: the target's own arrays, or the rows of its head that a cut vocabulary needs."""
    values: dict[str, jax.Array] = {}
    config, where = plan.config, plan.reader.path
    if EMBEDDING in plan.borrowed:
        if target is not None:
            values[EMBEDDING] = target.embedding.weight[...]
        elif table is not None:
            values[EMBEDDING] = jnp.asarray(table, jnp.dtype(dtype))
        else:
            raise CheckpointError(
                "the draft's file has no embedding",
                where=where,
                fix="name the target: --model=NAME (in Python: target, or target_embedding [vocabulary, width])",
            )
        shape = values[EMBEDDING].shape
        if shape != (config.vocab_size, config.hidden_size):
            raise CheckpointError(
                "the borrowed embedding does not fit the draft",
                where=where,
                found=list(shape),
                expected=[config.vocab_size, config.hidden_size],
            )
        report.note("draft", f"embedding: borrowed from the target, {list(shape)}")
    if not plan.borrowed & {HEAD, TARGET_NORM}:
        return values
    if target is None:
        raise CheckpointError(
            "the draft borrows its head or a norm from the target, which was not given",
            where=where,
            fix="name the target: --model=NAME (in Python: target)",
        )
    if TARGET_NORM in plan.borrowed:
        values[TARGET_NORM] = target.norm.scale[...]
    if HEAD in plan.borrowed:
        head = target.embedding.weight[...] if target.head is None else target.head.weight[...]
        whole = config.draft_vocab_size == head.shape[0]
        values[HEAD] = head if whole else jnp.take(head, jnp.asarray(plan.target_ids), axis=0)
        report.note(
            "draft",
            "head: borrowed from the target"
            + ("" if whole else f", the {config.draft_vocab_size} rows of the draft vocabulary"),
        )
    return values


def _score_temperature(flat: FlatConfig, where: object) -> tuple[float, ...]:
    manifest = flat.top.get(MANIFEST_KEY) or {}
    values = manifest.get("score_temperature") if isinstance(manifest, dict) else None
    if values is None:
        return ()
    numbers = isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values
    )
    if not numbers:
        raise ConfigError(
            "must be numbers above 0, one per level",
            where=f"{where}: {MANIFEST_KEY}.score_temperature",
            found=repr(values),
        )
    return tuple(float(value) for value in values)


def _report(
    flat: FlatConfig,
    tensors: DraftTensors,
    config: DraftConfig,
    capture: CaptureReading,
    unknown_keys: list[str],
    report: LoadReport,
) -> None:
    """The choices of a load in plain words."""
    note = lambda line: report.note("draft", line)
    note(f"captures: {capture.source}" + (f" -> boundaries {list(capture.boundaries)}" if capture.boundaries else ""))
    if capture.warning:
        report.warn(capture.warning)
    if capture.ambiguous:
        report.warn(capture.source + "; the first is used unless a probe or capture= says otherwise")
    fc = "no fc" if not config.fc else f"fc [{config.hidden_size}, {config.captures} x {config.target_hidden_size}]"
    note(
        f"{len(config.layers)} layer(s), {layer_attention(config.layers[0])}; {fc}"
        + (" with bias" if config.fc_bias else "")
    )
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switched = [flag for flag in flags if getattr(config, flag)]
    switched += [
        f"no {name}"
        for name, used in (
            ("input_layernorm", config.input_norm),
            ("hidden_norm", config.hidden_norm),
            ("final norm", config.final_norm),
        )
        if not used
    ]
    if flat.layer.get("bias") is True and not config.fc_bias:
        note("bias true in the config is not used: the file holds no fc.bias")
    note("flags: " + (", ".join(switched) or "none (plain EAGLE-3)"))
    if config.norm_output:
        note(
            "norm_output: exporters before September 2026 wrote it by mistake; if acceptance is poor, try it with false"
        )
    note(
        "embedding: "
        + ("own" if config.own_embedding else "not in the file")
        + "; head: "
        + ("own" if config.own_head else "not in the file")
    )
    said = flat.layer.get("vocab_size")
    marked = tensors.shape("t2d")
    real = marked[0] if marked else config.vocab_size
    if said is not None and said != real:
        note(f"vocab_size {said} in the config is not used: the tensors say {real}")
    if config.max_position:
        note(
            f"max_position_embeddings {config.max_position} sets no limit: rotary positions are computed, not looked up"
        )
    if tensors.skipped:
        note(f"skipped, computed or not needed: {', '.join(tensors.skipped)}")
    if tensors.unknown:
        report.warn(f"unknown tensors in the draft's file, not used: {', '.join(tensors.unknown)}")
    if unknown_keys:
        note(f"unknown config keys, not used: {', '.join(unknown_keys)}")
