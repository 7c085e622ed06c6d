"""Several processes run one program together: they must ask for the same things in the same order.

A process that waits inside a collective for one that never comes waits for ever. So before anything is run, the processes tell each other
what they are about to do, over the coordinator and with a time limit: where they disagree, or one stays away, all say so.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import jax

from eaglejax.errors import ConfigError, EagleJaxError

LIMIT_VARIABLE, DEFAULT_LIMIT, LONGEST_LIMIT = "EAGLEJAX_PROCESS_TIMEOUT_S", 300, 86_400
LONGEST_TEXT, REFUSED = 4000, "refused here: "
T = TypeVar("T")
_meetings = itertools.count()


class ProcessError(EagleJaxError):
    """The processes of a run do not do the same, or one of them is gone."""


def time_limit() -> float:
    """Seconds that processes wait for one another. Raises ConfigError where EAGLEJAX_PROCESS_TIMEOUT_S is no such number."""
    text = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT))
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 1 <= limit <= LONGEST_LIMIT:
        raise ConfigError(
            "not a time limit", where=LIMIT_VARIABLE, found=repr(text), expected=f"1 to {LONGEST_LIMIT} s"
        )
    return limit


def connect(coordinator: str, processes: int, process: int, *, patience: float = 0) -> None:
    """Join a run of `processes` processes; the first call of jax in each of them.

    Arguments:
        coordinator: HOST:PORT of process 0.
        process: this one's number, from 0.
        patience: seconds beyond the time limit.

    Where not all come within the time limit jax ends the process; the runner says so in a sentence before that.
    """
    if not 0 <= process < processes:
        raise ConfigError("no such process", where="process_id", found=process, expected=f"0 to {processes - 1}")
    limit = time_limit()
    try:
        jax.distributed.initialize(
            coordinator, num_processes=processes, process_id=process, initialization_timeout=math.ceil(limit + patience)
        )
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
    text = f"{what} {value!r}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    told = _meet(f"{text[:LONGEST_TEXT]}\n{digest}", what)
    if len(set(told)) > 1:
        raise ProcessError(
            "the processes do not ask for the same",
            where=what,
            found="; ".join(f"process {index}: {part}" for index, part in enumerate(_differing(told))),
            fix="give every process the same prompts, settings and checkpoints, in the same order",
        )


def _differing(told: Sequence[str]) -> list[str]:
    """The parts around the first place where the texts differ; whole refusals."""
    texts = [text.rsplit("\n", 1)[0] for text in told]
    first = next(
        (i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), min(map(len, texts))
    )
    start = max(0, first - 30)
    cut = lambda text: ("..." if start else "") + text[start : first + 60] + ("..." if len(text) > first + 60 else "")
    return [text if text.startswith(REFUSED) else cut(text) for text in texts]


@contextmanager
def telling(what: str) -> Iterator[None]:
    """What is refused inside is told to the other processes, who else would wait for this one at their next meeting."""
    try:
        yield
    except ProcessError:
        raise
    except EagleJaxError as error:
        if jax.process_count() > 1:
            _meet(f"{REFUSED}{what}: {error}"[:LONGEST_TEXT], what, wait=False)
        raise


def in_step(what: str, pieces: Iterator[T]) -> Iterator[T]:
    """`pieces`, each made only when all processes ask for it."""
    for number in itertools.count():
        agree(what, number)
        try:
            piece = next(pieces)
        except StopIteration:
            return
        yield piece


def from_first(value: int) -> int:
    """Process 0's value, in every process."""
    return value if jax.process_count() == 1 else int(_meet(str(value), "a shared number")[0])


def from_all(what: str, own: str) -> Sequence[str]:
    """What every process says, in their order; raises ProcessError as `agree` does, and where one of them refused inside `telling`."""
    told = [own] if jax.process_count() == 1 else _meet(own, what)
    if refused := [text for text in told if text.startswith(REFUSED)]:
        raise ProcessError("refused in another process", where=what, found="; ".join(refused))
    return told


def _meet(own: str, what: str, *, wait: bool = True) -> Sequence[str]:
    """What every process said at this meeting; all hold the same meetings in the same order."""
    from jax._src import distributed  # the coordinator's store has no public name; jax 0.10 and 0.11 alike

    client = distributed.global_state.client
    assert client is not None, "several processes without a coordinator"
    limit, told = time_limit(), []
    room = f"eaglejax/{next(_meetings)}"
    client.key_value_set(f"{room}/{jax.process_index()}", own)
    for index in range(jax.process_count() if wait else 0):
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
