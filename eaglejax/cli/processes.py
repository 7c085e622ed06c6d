"""The flags with which several processes run one mesh."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def together(processes: tuple[str, int, int] | None) -> Iterator[None]:
    """Join the others and run the body with them. Only process 0 prints answers; the others still show errors.

    Where they do not all come, or one is lost on the way, this process ends at once with exit code 1 and one sentence: jax's own end of a
    run that broke is an abort from below Python.
    """
    if processes is None:
        yield
        return
    from jax.errors import JaxRuntimeError

    from eaglejax.sharding.processes import ProcessError

    _join(processes)
    try:
        yield
    except ProcessError as error:
        _end(str(error))
    except JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        _end(
            f"another process of this run is gone, or the connection to it broke; found {reason}; start all of them again"
        )


def _join(processes: tuple[str, int, int]) -> None:
    from eaglejax.sharding.processes import LIMIT_VARIABLE, connect, leads, time_limit

    coordinator, count, process = processes
    limit = time_limit()
    missing = (
        f"not all of the {count} processes came within {limit:.0f} s; found process {process}, coordinator {coordinator}; start all of "
        f"them with the same coordinator and number of processes; {LIMIT_VARIABLE} sets the time limit"
    )
    watch = threading.Timer(limit, _end, [missing])
    watch.daemon = True
    watch.start()
    # a CPU's collectives write of their connections to standard output from below Python: that goes to standard error, for the rest
    # of the process, and the answers keep the stream to themselves
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        connect(coordinator, count, process, patience=60)
    finally:
        watch.cancel()
    sys.stdout = os.fdopen(answers, "w") if leads() else open(os.devnull, "w")  # noqa: SIM115


def _end(message: str) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
