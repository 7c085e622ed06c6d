"""Several processes run one program together: they must ask for the same things in the same order.

A process that waits inside a collective for one that never comes waits for ever. So before anything is run, the processes tell each other
what they are about to do, over the coordinator and with a time limit: where they disagree, or one stays away, all say so.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence

import jax

from eaglejax.errors import ConfigError, EagleJaxError

LIMIT_VARIABLE, DEFAULT_LIMIT = "EAGLEJAX_PROCESS_TIMEOUT_S", 300
_meetings = itertools.count()


class ProcessError(EagleJaxError):
    """The processes of a run do not do the same, or one of them is gone."""


def connect(coordinator: str, processes: int, process: int) -> None:
    """Join a run of `processes` processes; the first call of jax in each of them.

    Arguments:
        coordinator: HOST:PORT of process 0.
        process: this one's number, from 0.
    """
    if not 0 <= process < processes:
        raise ConfigError("no such process", where="process_id", found=process, expected=f"0 to {processes - 1}")
    try:
        jax.distributed.initialize(coordinator, num_processes=processes, process_id=process)
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            "the processes did not find each other",
            where=f"coordinator {coordinator}, process {process} of {processes}",
            found=" ".join(str(error).split())[:200],
            fix="start all of them with the same coordinator and number of processes",
        ) from None


def agree(what: str, value: object) -> None:
    """Refuse, in every process, where the processes do not all give the same `value` (told by its repr) for `what`.

    Raises ProcessError: they differ, or one has not come within EAGLEJAX_PROCESS_TIMEOUT_S seconds (300).
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    told = _meet(f"{what} {digest}", what)
    if len(set(told)) > 1:
        raise ProcessError(
            "the processes do not ask for the same",
            where=what,
            found=", ".join(f"process {index}: {text}" for index, text in enumerate(told)),
            fix="give every process the same prompts, settings and checkpoints, in the same order",
        )


def from_first(value: int) -> int:
    """Process 0's value, in every process."""
    return value if jax.process_count() == 1 else int(_meet(str(value), "a shared number")[0])


def from_all(what: str, own: str) -> Sequence[str]:
    """What every process says, in their order; raises ProcessError as `agree` does."""
    return [own] if jax.process_count() == 1 else _meet(own, what)


def _meet(own: str, what: str) -> Sequence[str]:
    """What every process said at this meeting; all hold the same meetings in the same order."""
    from jax._src import distributed  # the coordinator's store has no public name; jax 0.10 and 0.11 alike

    client = distributed.global_state.client
    assert client is not None, "several processes without a coordinator"
    limit = float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
    room = f"eaglejax/{next(_meetings)}"
    client.key_value_set(f"{room}/{jax.process_index()}", own)
    told = []
    for index in range(jax.process_count()):
        try:
            told.append(client.blocking_key_value_get(f"{room}/{index}", int(limit * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"process {index} has not come to this point within {limit:.0f} s, or is gone",
                where=what,
                found=" ".join(str(error).split())[:120],
                fix=f"every process must make the same calls; {LIMIT_VARIABLE} sets the time limit",
            ) from None
    return told


def leads() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0
