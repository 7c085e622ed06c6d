"""The flags with which several processes run one mesh."""

from __future__ import annotations

import os
import sys

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.config import whole_number
from eaglejax.errors import EagleJaxError

NAMES = ("coordinator", "num_processes", "process_id")


def read_processes(flags: FlagValues) -> tuple[str, int, int] | None:
    """(coordinator, number of processes, this one's number), or None for one process alone. Raises UsageError."""
    values = {name: given(flags, name) for name in NAMES}
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if len(missing) == len(NAMES):
        return None
    if missing:
        raise UsageError(f"several processes need {', '.join(missing)} too")
    try:
        count = whole_number("num_processes", values["num_processes"], 1)
        return values["coordinator"], count, whole_number("process_id", values["process_id"], 0, count - 1)
    except EagleJaxError as error:
        raise UsageError(f"--{error}") from None


def join(processes: tuple[str, int, int]) -> None:
    """Join the others. Only process 0 prints answers; the others still show errors."""
    from eaglejax.sharding.processes import connect, leads

    # a CPU's collectives write of their connections to standard output from below Python: that goes to standard error, for the rest
    # of the process, and the answers keep the stream to themselves
    answers = os.dup(1)
    os.dup2(2, 1)
    connect(*processes)
    sys.stdout = os.fdopen(answers, "w") if leads() else open(os.devnull, "w")  # noqa: SIM115
