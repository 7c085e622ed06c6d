"""From names to a checked pair of models: resolve, read, compare, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from eaglejax.checkpoint.choice import packings
from eaglejax.checkpoint.draft_loader import HEAD, DraftPlan, facts_of, inspect_draft, load_plan
from eaglejax.checkpoint.json_file import read_config
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.checkpoint.target_loader import abstract_target, build_target, check_target, open_target
from eaglejax.checkpoint.weight_plan import Recipe
from eaglejax.drafting import check_draft_config
from eaglejax.errors import ConfigError
from eaglejax.kernels import select, tile_store
from eaglejax.kernels.unserved import unserved
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import Capture, CaptureReading
from eaglejax.models.config import TargetConfig
from eaglejax.models.draft import Draft
from eaglejax.models.packed import Packing
from eaglejax.models.split import ModelSplit
from eaglejax.models.target import Target
from eaglejax.sharding.fit import Capacity, check_fit, needs_of
from eaglejax.sharding.local_shapes import LocalModel, local_config
from eaglejax.sharding.mesh import DATA, MODEL, axis_size
from eaglejax.sharding.rules import Placement, split_draft, split_target
from eaglejax.text.eos import read_eos_ids
from eaglejax.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer


@dataclass(frozen=True)
class DraftOrigin:
    """Where a draft was read from, and how it was told to be read: what it takes to read it in another way."""

    source: Source
    overrides: Mapping[str, Any]
    plan: DraftPlan
    split: ModelSplit


@dataclass
class Pair:
    """A target with its tokenizer, and the draft where there is one; on a mesh, where there is one.

    `origin`: None without a draft, and for a draft that was made rather than read.
    """

    name: str
    target: Target
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: jnp.dtype
    draft: Draft | None = None
    capture: CaptureReading | None = None
    report: LoadReport = field(default_factory=LoadReport)
    mesh: Mesh | None = None
    draft_name: str | None = None
    origin: DraftOrigin | None = None

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where the checkpoint has none."""
        if self.tokenizer is None:
            raise ConfigError(
                "this checkpoint has no tokenizer",
                where=self.name,
                expected="tokenizer.json or tiktoken.model",
                fix="use token ids",
            )
        return self.tokenizer


def load_pair(
    model: str,
    draft: str | None,
    *,
    capture: Capture,
    dtype: str,
    draft_config: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
    capacity: Capacity | None = None,
) -> Pair:
    """A target and, where one is named, its draft; every header of both is checked before the first weight is read.

    Arguments:
        capacity: what has to fit beside the weights, refused where it does not (`sharding/fit.py`); None is not asked.

    Raises CheckpointError or ConfigError; see `EagleJaxEngine.from_pretrained`.
    """
    report = LoadReport()
    select.chosen_kernels()  # a variable that says nonsense is refused before anything is read
    tile_store.stored()
    check_draft_config(draft_config)
    source = resolve(model)
    draft_source = resolve(draft) if draft is not None else None
    if draft_source is not None:
        _refuse_same(source, draft_source)
    reading, reader = open_target(source.path)
    chosen = check_target(reading, reader)
    if draft_source is None:
        _refuse_draft_settings(draft_config, capture)
        plan = None
    else:
        facts = facts_of(reading.config)
        plan = inspect_draft(draft_source, target=facts, capture=capture, overrides=draft_config, report=report)
    placement = placement or Placement()
    parts = _parts(reading.config, chosen, plan, dtype, mesh, placement)
    if capacity is not None:
        _check_fit(parts, plan, packings(chosen), capacity, mesh, report)
    tokenizer = load_tokenizer(source.folder, reader) if has_tokenizer(source.folder, reader) else None
    config = reader.hf_config or read_config(source.folder)
    folder = source.folder if reader.hf_config is None else None
    module: Any = parts.target.module
    pair = Pair(
        name=model,
        target=build_target(reading, reader, dtype, report, mesh, abstract=module),
        tokenizer=tokenizer,
        eos_ids=read_eos_ids(folder, config, tokenizer),
        dtype=jnp.dtype(dtype),
        report=report,
        mesh=mesh,
        draft_name=draft,
    )
    if plan is not None:
        assert parts.draft is not None and draft_source is not None
        config, split = plan.config, parts.draft.split
        build = lambda: Draft(config, dtype=dtype, split=split)
        loaded = load_plan(plan, dtype=dtype, target=pair.target, report=report, mesh=mesh, build=build)
        pair.draft, pair.capture = loaded.draft, loaded.capture
        pair.origin = DraftOrigin(draft_source, dict(draft_config or {}), plan, split)
    _report_mesh(pair, placement, parts.notes)
    _report_text(pair)
    for line in (*select.describe(), *unserved(pair.target, 0 if capacity is None else capacity.max_len)):
        report.note("kernels", line)
    tile_store.note_tiles(report)
    return pair


@dataclass(frozen=True)
class _Parts:
    """What each device will hold of the two models, as shapes. `notes`: what stays whole, in words."""

    target: LocalModel
    draft: LocalModel | None
    notes: list[str]
    itemsize: int


def _parts(
    config: TargetConfig,
    chosen: Mapping[str, Recipe],
    plan: DraftPlan | None,
    dtype: str,
    mesh: Mesh | None,
    placement: Placement,
) -> _Parts:
    size, notes = axis_size(mesh, MODEL), []
    split = split_target(config, size, placement, notes)
    module = abstract_target(lambda: Target(config, dtype=dtype, split=split), chosen)
    target = LocalModel(local_config(config, split), split, module)
    if plan is None:
        return _Parts(target, None, notes, jnp.dtype(dtype).itemsize)
    own, own_split = plan.config, split_draft(plan.config, size, placement, notes)
    abstract = nnx.eval_shape(lambda: Draft(own, dtype=dtype, split=own_split))
    draft = LocalModel(local_config(own, own_split), own_split, abstract)
    return _Parts(target, draft, notes, jnp.dtype(dtype).itemsize)


def _check_fit(
    parts: _Parts,
    plan: DraftPlan | None,
    packed: Mapping[str, Packing],
    capacity: Capacity,
    mesh: Mesh | None,
    report: LoadReport,
) -> None:
    shared: set[str] = set()
    if plan is not None:
        # a draft that is whole on every device copies what the target has split
        copied = parts.target.vocab_split and parts.draft is not None and not parts.draft.vocab_split
        shared = set() if copied else set(plan.borrowed)
        shared |= {HEAD} if plan.tied else set()
    limit = parts.target.config.max_position
    if limit and capacity.max_len > limit:
        capacity = replace(capacity, max_len=limit)
    check_fit(needs_of(parts.target, parts.draft, shared, packed, capacity, parts.itemsize, mesh), mesh, report)


def _refuse_draft_settings(draft_config: Mapping[str, Any] | None, capture: Capture) -> None:
    if draft_config:
        raise ConfigError(
            "a draft's config is replaced, and no draft is given", where="draft_config", fix="pass draft="
        )
    if capture != "auto":
        raise ConfigError(
            "captures belong to a draft, and none is given", where="capture", found=repr(capture), fix="pass draft="
        )


def _refuse_same(target: Source, draft: Source) -> None:
    if target.path.resolve() == draft.path.resolve():
        raise ConfigError(
            "the draft is the target itself",
            where="draft",
            found=draft.path,
            expected="the folder of an EAGLE-3 draft made for this target",
        )


def _report_mesh(pair: Pair, placement: Placement, notes: list[str]) -> None:
    if pair.mesh is None:
        return
    data, model = axis_size(pair.mesh, DATA), axis_size(pair.mesh, MODEL)
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    kind = pair.mesh.devices.flat[0].device_kind
    pair.report.note("mesh", f"data {data} x model {model} ({kind}{processes}); slots over data, weights over model")
    if pair.draft is not None:
        pair.report.note("mesh", f"draft: {placement.draft}")
    for line in notes:
        pair.report.note("mesh", line)


def _report_text(pair: Pair) -> None:
    if pair.tokenizer is None:
        pair.report.note("text", "no tokenizer: token ids only")
    else:
        for line in pair.tokenizer.notes:
            pair.report.note("text", line)
        padding = pair.target.config.vocab_size - pair.tokenizer.vocab_size
        if padding > 0:
            pair.report.note(
                "text",
                f"{padding} rows of the vocabulary are no token: drawn as plain decoding would draw them, and without text",
            )
    pair.report.note("text", f"EOS ids: {', '.join(map(str, pair.eos_ids)) or 'none'}")
