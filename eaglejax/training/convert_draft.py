"""A draft's folder of any readable format, written in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.durable import swap_folder
from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.capture import Capture
from eaglejax.models.target import Target
from eaglejax.training.checkpoints import BEST, LAST
from eaglejax.training.export import Form, check_form, write_draft
from eaglejax.training.identity import target_digest
from eaglejax.training.run_folder import run_facts, trained, writing
from eaglejax.training.weights import EMBEDDING, HEAD, frozen_weights, trained_weights


def convert_draft(
    source: str,
    out: Path,
    *,
    model: str | None,
    form: Form,
    int8: bool = False,
    whole: bool = False,
    capture: Capture = "auto",
) -> int:
    """Write `source` in `form` to the folder `out`, which must not be there; returns the bytes of its tensors' file.

    Arguments:
        source: a draft as `EagleJaxEngine.from_pretrained` takes it, or the folder of a training run.
        model: its target, whose embedding and head are needed where the draft borrows them; None: that of the run.
        int8: see `write_draft`. whole: write borrowed embedding and head too.
        capture: how the source numbers its layers, where it does not say.

    Raises CheckpointError and ConfigError; nothing is written then.
    """
    if out.exists():
        raise CheckpointError("is already there", where=out, fix="name a folder to be made")
    folder = resolve(trained(source))
    report = LoadReport()
    begun = run_facts(Path(source), (BEST, LAST)) if trained(source) != source else None
    if model is None and begun is not None:
        model = _model_of(begun[0], begun[1])
    target = None if model is None else load_target(resolve(model).path, dtype="float32", report=report)
    if target is not None and begun is not None:
        _check_target(target, model, *begun)
    loaded = read_draft(folder, dtype="float32", target=target, capture=capture, report=report)
    if loaded.capture.ambiguous or not loaded.capture.boundaries:
        raise CheckpointError(
            "does not say which layers it reads",
            where=folder.path,
            found=loaded.capture.source or "no capture ids, and no target to count layers of",
            fix="--capture=input, --capture=output or boundaries such as --capture=3,31,59; and --model",
        )
    check_form(loaded.config, form, int8)
    borrowed = frozen_weights(loaded.draft)
    whole = whole or form == "speculators"
    embedding = np.asarray(borrowed[EMBEDDING], np.float32) if whole or loaded.config.own_embedding else None
    head = np.asarray(borrowed[HEAD], np.float32) if whole and not loaded.config.own_head else None
    weights = {path: np.asarray(value.astype(jnp.float32)) for path, value in trained_weights(loaded.draft).items()}
    with writing(out, "export again"):
        out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out, "export again"), swap_folder(out) as fresh:
        write_draft(
            fresh,
            loaded.config,
            weights,
            np.asarray(loaded.draft.target_ids[...]),
            int8=int8,
            form=form,
            embedding=embedding,
            head=head,
            verifier=model,
        )
    return (out / "model.safetensors").stat().st_size


def _model_of(facts: dict[str, Any], where: Path) -> str | None:
    """The target of a run, where it is still there."""
    model = facts.get("settings", {}).get("model")
    if model is None:
        return None
    try:
        resolve(model)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"the target that the run was trained for is not found ({error.what})",
            where=where,
            found=model,
            fix="name it: --model=NAME",
        ) from None
    return model


def _check_target(target: Target, model: str | None, facts: dict[str, Any], where: Path) -> None:
    """Refuse another target than the run's: the draft would get the embedding of another model."""
    run, dtype = facts.get("run", {}), facts.get("settings", {}).get("dtype", "float32")
    if "target" in run and run["target"] != (found := target_digest(target, dtype)):
        raise ConfigError(
            "is not the target that this run was trained for",
            where=f"model {model}",
            found=f"digest {found}",
            expected=f"{run['target']}, of {facts.get('settings', {}).get('model')}, as {where} says",
            fix="leave --model out, or name the run's target",
        )
