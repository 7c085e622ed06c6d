"""`eaglejax check`: is the draft wired as it was trained, is decoding lossless, do the tables fit? Exit code 1 where something is wrong."""

from __future__ import annotations

import json
import sys

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import read_settings
from eaglejax.config import whole_number
from eaglejax.errors import ConfigError

GROUPS = ("check", "model", "speculation", "result", "run")
TOKENS, LEAST_TOKENS = 512, 64  # as in measure/check.py, which imports jax


def main(flags: FlagValues) -> int:
    settings = read_settings(flags)
    try:
        tokens = whole_number("tokens", given(flags, "tokens") or TOKENS, LEAST_TOKENS, 10**6)
    except ConfigError as error:
        raise UsageError(f"--{error}") from None
    parts = {name: flags[name].value is not False for name in ("wiring", "lossless")}
    if settings.draft is None:
        raise UsageError("--draft: check looks at a target and its draft, and no draft is named")

    # jax from here on
    from dataclasses import replace

    from eaglejax.cli.progress import stage
    from eaglejax.cli.session import Session
    from eaglejax.measure.check import check

    # what is looked at in full needs no quick look before
    session = Session(replace(settings, check_wiring=False), report=bool(flags["report"].value))
    report = check(session.engine, tokens=tokens, progress=stage, **parts)
    if flags["json"].value:
        print(json.dumps(report.to_json()))
    else:
        print(report)
    for item in report.wrong:
        print(f"WRONG: {item.name}: {item.line}", file=sys.stderr)
    return 0 if report.ok else 1
