"""`eaglejax train --config=run.toml`: train a draft on the target's own answers; the same command goes on after a stop."""

from __future__ import annotations

import json
import sys
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli import flags as known
from eaglejax.cli.flags import UsageError, given
from eaglejax.errors import ConfigError

KEYS = ("train data", "train draft", "train step", "train run")
GROUPS = (*KEYS, "result", "refusal")


def main(flags: FlagValues) -> int:
    from eaglejax.training.train_config import build, read_file

    path = given(flags, "config")
    values: dict[str, Any] = read_file(path) if path is not None else {}
    chosen = {
        flag.name: value
        for group in KEYS
        for flag in known.GROUPS[group]
        if flag.name != "config" and (value := given(flags, flag.name)) is not None
    }

    def label(name: str) -> str:
        return f"--{name}" if name in chosen or name not in values else f"{path}: {name}"

    try:
        config = build({**values, **chosen}, label)
    except ConfigError as error:
        if str(error.where).startswith("--"):
            raise UsageError(str(error)) from None
        raise

    from eaglejax.cli.compile_cache import use_compile_cache
    from eaglejax.cli.progress import progress
    from eaglejax.training.run import train

    use_compile_cache()
    as_json = bool(flags["json"].value)
    outcome = train(config, lambda line: print(line, file=sys.stderr, flush=True), progress)
    if as_json:
        values = {"step": outcome.step, "reason": outcome.reason, "best_step": outcome.best_step}
        print(json.dumps({**values, "best_tau": outcome.best_tau, "draft": str(outcome.draft)}))
    else:
        why = "acceptance no longer rose" if outcome.reason == "patience" else "all steps taken"
        print(f"{outcome.draft}: tau {outcome.best_tau:.3f} at step {outcome.best_step} of {outcome.step} ({why})")
    return 0
