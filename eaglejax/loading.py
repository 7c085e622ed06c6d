"""From names to a checked pair of models: resolve, read, compare, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eaglejax.checkpoint.draft_loader import facts_of, inspect_draft, load_plan
from eaglejax.checkpoint.json_file import read_config
from eaglejax.checkpoint.source import Source, resolve
from eaglejax.checkpoint.target_loader import build_target, check_target, open_target
from eaglejax.drafting import check_draft_config
from eaglejax.errors import ConfigError
from eaglejax.kernels import select
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import Capture, CaptureReading
from eaglejax.models.draft import Draft
from eaglejax.models.split import UNSPLIT
from eaglejax.models.target import Target
from eaglejax.sharding.mesh import DATA, MODEL, axis_size
from eaglejax.sharding.rules import Placement, split_draft, split_target
from eaglejax.text.eos import read_eos_ids
from eaglejax.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer


@dataclass
class Pair:
    """A target with its tokenizer, and the draft where there is one; on a mesh, where there is one."""

    name: str
    target: Target
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    dtype: jnp.dtype
    draft: Draft | None = None
    capture: CaptureReading | None = None
    report: LoadReport = field(default_factory=LoadReport)
    mesh: Mesh | None = None


def load_pair(
    model: str,
    draft: str | None,
    *,
    capture: Capture,
    dtype: str,
    draft_config: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    placement: Placement | None = None,
) -> Pair:
    """A target and, where one is named, its draft; every header of both is checked before the first weight is read.

    Raises CheckpointError or ConfigError; see `EagleJaxEngine.from_pretrained`.
    """
    report = LoadReport()
    check_draft_config(draft_config)
    source = resolve(model)
    draft_source = resolve(draft) if draft is not None else None
    if draft_source is not None:
        _refuse_same(source, draft_source)
    reading, reader = open_target(source.path)
    check_target(reading, reader)
    plan = None
    if draft_source is not None:
        plan = inspect_draft(
            draft_source,
            target=facts_of(reading.config),
            capture=capture,
            overrides=draft_config,
            report=report,
        )
    elif draft_config:
        raise ConfigError(
            "a draft's config is replaced, and no draft is given", where="draft_config", fix="pass draft="
        )
    elif capture != "auto":
        raise ConfigError(
            "captures belong to a draft, and none is given", where="capture", found=repr(capture), fix="pass draft="
        )
    placement, size, notes = placement or Placement(), axis_size(mesh, MODEL), []
    split = split_target(reading.config, size, placement, notes)
    draft_split = split_draft(plan.config, size, placement, notes) if plan is not None else None
    tokenizer = load_tokenizer(source.folder, reader) if has_tokenizer(source.folder, reader) else None
    config = reader.hf_config or read_config(source.folder)
    folder = source.folder if reader.hf_config is None else None
    pair = Pair(
        name=model,
        target=build_target(
            reading, reader, dtype, report, mesh, lambda: Target(reading.config, dtype=dtype, split=split)
        ),
        tokenizer=tokenizer,
        eos_ids=read_eos_ids(folder, config, tokenizer),
        dtype=jnp.dtype(dtype),
        report=report,
        mesh=mesh,
    )
    if plan is not None:
        config, own_split = plan.config, draft_split or UNSPLIT
        build = lambda: Draft(config, dtype=dtype, split=own_split)
        loaded = load_plan(plan, dtype=dtype, target=pair.target, report=report, mesh=mesh, build=build)
        pair.draft, pair.capture = loaded.draft, loaded.capture
    _report_mesh(pair, placement, notes)
    _report_text(pair)
    for line in select.describe():
        report.note("kernels", line)
    return pair


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
