"""`eaglejax tune`: measure this machine and pair, and store the trees that "auto" chooses among."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import read_settings
from eaglejax.config import real_number, whole_number
from eaglejax.errors import ConfigError, EagleJaxError

GROUPS = ("tune", "model", "run")


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError."""
    settings = read_settings(flags)
    try:
        tokens = whole_number("max_new_tokens", given(flags, "max_new_tokens") or 64, 1)
        temperature = real_number("temperature", given(flags, "temperature") or 0.8, 0, 1e4)
    except EagleJaxError as error:
        raise UsageError(f"--{error}") from None
    if settings.draft is None:
        raise ConfigError("there is nothing to tune without a draft", where="--draft", fix="name a draft")
    names = [name for name in (given(flags, "prompts") or "").split(",") if name]

    from eaglejax.measure.prompt_sets import check_set

    for name in names:
        check_set(name)

    # jax from here on
    from eaglejax.cli.progress import progress
    from eaglejax.cli.session import Session
    from eaglejax.measure.tune_report import tune_report
    from eaglejax.measure.tuning import stored_path

    session = Session(settings, report=bool(flags["report"].value))
    engine = session.engine
    out = given(flags, "out")
    prompts = _mixed(names, engine) if names else None
    tuning = engine.tune(prompts, max_new_tokens=tokens, temperature=temperature, store=out is None, progress=progress)
    path = Path(out) if out is not None else stored_path(tuning.holds_for)
    if out is not None:
        tuning.save(path)
    print(json.dumps(tuning.to_json()) if flags["json"].value else tune_report(tuning, path))
    return 0


def _mixed(names: list[str], engine: Any) -> list[Any]:
    """As many prompts as there are slots, of all sets in turn."""
    from eaglejax.measure.prompt_sets import read_prompts

    each = -(-engine.slots // len(names))
    sets = [read_prompts(name, each, vocab_size=engine.vocab_size) for name in names]
    turns = [prompts[turn].content for turn in range(each) for prompts in sets if turn < len(prompts)]
    return turns[: engine.slots]
