"""`eaglejax train --config=run.toml`: train a draft on the target's own answers; the same command goes on after a stop."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from typing import Any

from absl.flags import FlagValues

from eaglejax.cli import flags as known
from eaglejax.cli.flags import UsageError, given
from eaglejax.errors import ConfigError, EagleJaxError

KEYS = ("train data", "train draft", "train step", "train run")
GROUPS = (*KEYS, "result", "refusal")
INTERRUPTED, TERMINATED = 130, 143


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
    before = signal.signal(signal.SIGTERM, _stop) if threading.current_thread() is threading.main_thread() else None
    try:
        outcome = train(config, lambda line: print(line, file=sys.stderr, flush=True), progress)
    except EagleJaxError as error:
        if error.where in vars(config):  # a setting that does not fit the target: named as it was given
            where = label(str(error.where))
            raise type(error)(
                error.what, where=where, found=error.found, expected=error.expected, fix=error.fix
            ) from error
        raise
    except KeyboardInterrupt as stop:
        print("\nstopped: the same command goes on from the last checkpoint", file=sys.stderr)
        return TERMINATED if isinstance(stop, _Terminated) else INTERRUPTED
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    tau = outcome.best_tau if math.isfinite(outcome.best_tau) else None
    if flags["json"].value:
        values = {"step": outcome.step, "reason": outcome.reason, "best_step": outcome.best_step}
        print(json.dumps({**values, "best_tau": tau, "draft": str(outcome.draft)}))
        return 0
    why = "acceptance no longer rose" if outcome.reason == "patience" else "all steps taken"
    found = "no acceptance found at any step of" if tau is None else f"tau {tau:.3f} at step {outcome.best_step} of"
    print(f"{outcome.draft}: {found} {outcome.step} ({why})")
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM: a run ends by it as by Ctrl-C, with its files closed."""


def _stop(number: int, frame: Any) -> None:
    raise _Terminated
