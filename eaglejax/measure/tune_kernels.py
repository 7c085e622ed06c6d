"""Measures the tiles of our GPU kernels on this device, shape by shape: every candidate beside the rule's choice, right ones only."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eaglejax.errors import EagleJaxError
from eaglejax.kernels import tiles
from eaglejax.kernels.tile_candidates import candidates, rule
from eaglejax.kernels.tile_store import Found, Here, here
from eaglejax.kernels.tiles import Choice, Key, choice_text
from eaglejax.measure.kernel_cases import Case, make_case
from eaglejax.measure.timing import alternate, seconds

# of a result in bfloat16, relative to float32, by norm: the kernels measured 0.0017 to 0.0024 (docs/kernels.md)
MOST_ERROR = 1e-2
# a choice has to be so much faster than the rule over all numbers of rows, and may be so much slower for none
MARGIN = 0.02
TRIPS, REPEATS = 25, 9
COMPILERS = 8

Choices = Sequence[Choice | None]
# microseconds a layer of each choice (None: the rule), one value per round; rounds alternate between the choices
Timer = Callable[[Case, Choices], list[list[float]]]


@dataclass(frozen=True)
class Measured:
    """One shape. `tried`: candidates timed. `dropped`: those that gave no right result, and why."""

    found: Found
    tried: int
    dropped: tuple[str, ...] = ()


def tune_key(key: Key, rows: Sequence[int], timer: Timer | None = None) -> Measured:
    """The best candidate for these numbers of rows together, and what it takes beside the rule.

    Raises EagleJaxError where the kernel is wrong by its own rule: then nothing that it says of time counts.
    """
    kept: list[Choice] = list(candidates(key))
    dropped: list[str] = []
    spans: list[dict[Choice | None, list[float]]] = []
    for count in rows:
        case = make_case(key, count)
        for choice, reason in zip([None, *kept], wrongs(case, [None, *kept]), strict=True):
            if reason is None:
                continue
            if choice is None:
                raise EagleJaxError(f"the kernel is wrong here: {reason}", where=f"{key}, {count} rows")
            kept.remove(choice)
            dropped.append(f"{choice_text(key.kernel, choice)}: {reason} ({count} rows)")
        asked = [None, *kept]
        spans.append(dict(zip(asked, (timer or time_choices)(case, asked), strict=True)))
    best = _best(kept, spans)
    medians = lambda choice: tuple(round(statistics.median(one[choice]), 2) for one in spans)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = Found(key, best, tuple(rows), medians(None), medians(best), day)
    return Measured(found, len(kept), tuple(dropped))


def _best(kept: Sequence[Choice], spans: Sequence[dict[Choice | None, list[float]]]) -> Choice | None:
    """By the medians of ratios within rounds, the geometric mean over the numbers of rows; None where the rule is as good."""
    best, least = None, 1 - MARGIN
    for choice in kept:
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(one[choice], one[None], strict=True))
            for one in spans
        ]
        mean = statistics.geometric_mean(ratios)
        if mean < least and max(ratios) <= 1 + MARGIN:
            best, least = choice, mean
    return best


def wrongs(case: Case, choices: Choices) -> list[str | None]:
    """Why each choice is no use: its first layer's result beside the twin's in float32, or what the compiler says; None if it is right."""
    layer = case.layers[0]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (case.start, layer))
    want = case.compared(jax.jit(case.twin)(*wide)).astype(jnp.float32)
    reasons: list[str | None] = []
    for program in _compiled(case, choices, case.run, (case.start, layer)):
        if isinstance(program, Exception):
            said = str(program).splitlines() or [type(program).__name__]
            reasons.append(f"does not compile: {said[0][:120]}")
            continue
        got = case.compared(program(*jax.tree.leaves((case.start, layer)))).astype(jnp.float32)
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        reasons.append(None if error <= MOST_ERROR else f"relative error {error:.3g}")  # NaN is none either
    return reasons


def time_choices(case: Case, choices: Choices, *, trips: int = TRIPS, repeats: int = REPEATS) -> list[list[float]]:
    """A `Timer`: all layers, `trips` times over in one compiled loop, in turns after a warm run of each."""
    given = (case.start, jnp.zeros((), case.start.dtype), case.layers)
    programs = _compiled(case, choices, _looped(case, trips), given)
    for program in programs:
        if isinstance(program, Exception):  # its one layer alone did compile
            raise program
    flat = jax.tree.leaves(given)
    runs = {index: lambda program=program: seconds(lambda: program(*flat)) for index, program in enumerate(programs)}
    spans = alternate(runs, repeats=repeats)
    return [[1e6 * value / trips / len(case.layers) for value in spans[index]] for index in runs]


def _looped(case: Case, trips: int) -> Callable[..., Any]:
    """A number of trips that the compiler knows: else the host would be asked before each."""
    one = jax.jit(case.run)

    def program(start: Any, scale: Any, layers: list[Any]) -> Any:
        def body(_: Any, x: Any) -> Any:
            for layer in layers:
                out = jax.tree.leaves(one(x, layer))[0]
                fed = out if out.shape == x.shape else out.ravel()[0]
                # scale is 0, which the compiler does not know: every layer waits for the one before it, and its rows are known
                x = start + fed.astype(x.dtype) * scale
            return x

        return lax.fori_loop(0, trips, body, start)

    return program


def _compiled(case: Case, choices: Choices, function: Callable[..., Any], given: tuple[Any, ...]) -> list[Any]:
    """For each choice a program of the leaves of `given`, or the exception in its place. Traced in turn, compiled side by side."""
    flat, structure = jax.tree.flatten(given)  # a lowered program keeps shapes where our types want arrays

    def lower(choice: Choice | None) -> Any:
        try:
            with tiles.using({} if choice is None else {case.key: choice}):
                return jax.jit(lambda *leaves: function(*structure.unflatten(leaves))).lower(*flat)
        except Exception as error:  # of any kind: it is told, and the candidate is out
            return error

    def finish(lowered: Any) -> Any:
        try:
            return lowered if isinstance(lowered, Exception) else lowered.compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(COMPILERS) as pool:
        return list(pool.map(finish, [lower(choice) for choice in choices]))


def to_text(measured: Sequence[Measured], now: Here | None = None) -> str:
    """A table: a line for each shape and number of rows."""
    now = now or here()
    head = f"{now.device}, jax {now.jax}: " if now else ""
    lines = [f"{head}microseconds a layer, medians of {REPEATS} rounds", ""]
    lines.append(f"{'rows':>5} {'rule us':>9} {'best us':>9}  choice (of how many)")
    for one in measured:
        found = one.found
        lines.append(str(found.key))
        for index, rows in enumerate(found.rows):
            choice = "" if index else f"  {choice_text(found.key.kernel, found.choice)} ({one.tried})"
            lines.append(f"{rows:5d} {found.rule_us[index]:9.2f} {found.best_us[index]:9.2f}{choice}")
        lines += [f"      left out: {reason}" for reason in one.dropped]
    return "\n".join(lines)


def listing(keys: Sequence[Key], kept: dict[Key, Found]) -> str:
    """What would be measured and what is stored, without running anything."""
    lines = []
    for key in keys:
        lines.append(str(key))
        by_rule = choice_text(key.kernel, rule(key))
        lines.append(
            f"  rule (one row): {by_rule}; {len(candidates(key))} candidates; stored: {_stored_text(key, kept)}"
        )
    others = [key for key in kept if key not in keys]
    lines += [f"{key}\n  stored: {_stored_text(key, kept)}" for key in others]
    return "\n".join(lines)


def _stored_text(key: Key, kept: dict[Key, Found]) -> str:
    if (found := kept.get(key)) is None:
        return "nothing"
    times = ", ".join(
        f"{rows} rows {best:.2f} us (rule {own:.2f})"
        for rows, best, own in zip(found.rows, found.best_us, found.rule_us, strict=True)
    )
    return f"{choice_text(key.kernel, found.choice)}, {times}, {found.date}"
