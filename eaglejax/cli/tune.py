"""`eaglejax tune`: measure this machine and pair, and store the trees that "auto" chooses among."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import read_settings
from eaglejax.config import real_number, whole_number
from eaglejax.errors import ConfigError, EagleJaxError
from eaglejax.measure.outputs import check_file

LEAST_TOKENS = 16  # as in measure/tune.py, which imports jax
GROUPS = ("tune", "tune model", "run")


def main(flags: FlagValues) -> int:
    """The command; returns its exit code. Raises UsageError and EagleJaxError."""
    settings = read_settings(flags)
    try:
        tokens = whole_number("max_new_tokens", given(flags, "max_new_tokens") or 64, LEAST_TOKENS)
        confirm = whole_number("confirm", given(flags, "confirm") or 3, 1)
        temperature = real_number("temperature", given(flags, "temperature") or 0.8, 0, 1e4)
    except EagleJaxError as error:
        raise UsageError(f"--{error}") from None
    if tokens >= settings.max_len:
        raise UsageError(
            f"--max_new_tokens: no prompt has room beside so many; found {tokens}; expected less than --max_len, {settings.max_len}"
        )
    if settings.draft is None:
        raise ConfigError("there is nothing to tune without a draft", where="--draft", fix="name a draft")
    names = [name for name in (given(flags, "prompts") or "").split(",") if name]

    from eaglejax.measure.prompt_sets import check_prompts

    for name in names:
        check_prompts(name)

    out = given(flags, "out")
    if out is not None:
        check_file(Path(out), f"--out {out}", replaced=True)

    # jax from here on
    from eaglejax.cli.progress import stage
    from eaglejax.cli.session import Session
    from eaglejax.measure.tune import mixed_prompts
    from eaglejax.measure.tune_report import tune_report
    from eaglejax.measure.tuning import stored_path

    # what was tuned before is no part of tuning again
    session = Session(replace(settings, tuning="none"), report=bool(flags["report"].value))
    engine = session.engine
    prompts = mixed_prompts(engine, names) if names else None
    tuning = engine.tune(
        prompts,
        max_new_tokens=tokens,
        temperature=temperature,
        confirm=confirm,
        store=out is None,
        progress=stage,
    )
    path = Path(out) if out is not None else stored_path(tuning.holds_for)
    if out is not None:
        tuning.save(path)
    print(json.dumps(tuning.to_json()) if flags["json"].value else tune_report(tuning, path))
    return 0
