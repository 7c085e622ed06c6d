"""Plain and speculative decoding side by side: in one process, on the same prompts, warm, taking turns.

For every prompt set, number of slots and temperature all trees and plain decoding take turns, so that each ratio is one of neighbours in
time. Compilation is timed apart (`compile_clock.py`) and taken out of whatever it fell into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from eaglejax.config import Sampling
from eaglejax.engine import EagleJaxEngine
from eaglejax.errors import ConfigError
from eaglejax.measure.bench_fit import too_long, without_room
from eaglejax.measure.bench_grid import PLAIN, Cell, Grid, Skipped
from eaglejax.measure.bench_result import BenchResult, CellResult
from eaglejax.measure.bench_run import Run, fill_waves, run_once
from eaglejax.measure.compile_clock import CompileClock
from eaglejax.measure.environment import describe_environment
from eaglejax.measure.prompt_sets import RANDOM, Prompt, read_prompts
from eaglejax.measure.timing import alternate
from eaglejax.speculation.simulated import SimulatedAcceptance

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
WARM_UP_TOKENS = 4  # compile and touch everything; the speed of these is not told

RANDOM_WARNING = (
    "prompts of random token ids: a draft can hardly be right on them, so tau and ratios say nothing about text; "
    "they show the worst case"
)
RANDOM_WEIGHTS_WARNING = (
    "random weights: a draft is never right, so ratios tell what speculation costs and not what it gives; "
    "--simulate_acceptance makes up the latter"
)


@dataclass(frozen=True)
class Question:
    """What to measure.

    `limit`: prompts of each set, spread over it; 0: all. `sampling`: of every request but for the temperature, which is the grid's; its
    seed makes tokens comparable. `repeats`: turns that are timed. `warm_up`: turns before them, of a few tokens. `chat`: see
    `prompt_sets.read_prompts`. `simulated`: acceptance made up; then answers run on past EOS, which means nothing in such text.
    `draft_name`, `random_weights`: for the report.
    """

    grid: Grid
    sampling: Sampling
    limit: int = 8
    repeats: int = 3
    warm_up: int = 1
    chat: bool = True
    simulated: SimulatedAcceptance | None = None
    draft_name: str | None = None
    random_weights: bool = False

    def settings(self, engine: EagleJaxEngine) -> dict[str, Any]:
        """For the report."""
        asked = self.sampling
        return {
            "draft": self.draft_name or "none",
            "random_weights": self.random_weights,
            "prompts": list(self.grid.prompts),
            "prompts_of_each_set": self.limit or "all",
            "chat_template": self.chat,
            "max_new_tokens": asked.max_new_tokens,
            "max_len": engine.max_len,
            "slots": list(self.grid.slots),
            "temperatures": list(self.grid.temperatures),
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "min_p": asked.min_p,
            "seed": asked.seed,
            "ignore_eos": asked.ignore_eos or self.simulated is not None,
            "repeats": self.repeats,
            "warm_up_turns": self.warm_up,
        }


@dataclass(frozen=True)
class _Set:
    """A prompt set as token ids."""

    prompts: list[Prompt]
    ids: list[list[int]]


def run_bench(
    engine: EagleJaxEngine, question: Question, *, done: Callable[[Cell], object] = lambda cell: None
) -> BenchResult:
    """Measures every cell that can be; the others are told with their reason.

    Arguments:
        engine: its slots do not matter, its max_len does.
        done: called after every run of a cell, warm-up included (`runs_of` says how many there are).

    Raises PromptError for prompts that this model cannot be given, ConfigError where no cell at all could be measured.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "measures one process", where="bench", found=f"{jax.process_count()} processes", fix="run it with one"
        )
    sets = {name: _read(engine, question, name) for name in question.grid.prompts}
    clock = CompileClock()
    results: list[CellResult] = []
    skipped = list(question.grid.skipped)
    groups = question.grid.groups()
    for slots in question.grid.slots:
        served = engine.variant(slots=slots, simulated=question.simulated)
        room = without_room(served, [PLAIN, *question.grid.trees])
        for group in (group for group in groups if group[0].slots == slots):
            chosen = sets[group[0].prompts]
            cells, refused = _possible(served, question, group, chosen, room)
            skipped += refused
            if cells:
                measured, failed = _measure(served, question, cells, chosen, clock, done)
                results += measured
                skipped += failed
    if not results:
        reasons = "; ".join(f"{one.cell}: {one.reason}" for one in skipped)
        raise ConfigError("no cell could be measured", where="bench", found=reasons)
    order = {cell: number for number, cell in enumerate(cell for group in groups for cell in group)}
    results.sort(key=lambda result: order[result.cell])
    return BenchResult(
        tuple(results),
        tuple(skipped),
        {**question.settings(engine), "answers": {r.cell.describe(): len(r.names) for r in results}},
        describe_environment(engine.pair),
        tuple(_warnings(question, results)),
        tuple(question.simulated.rates) if question.simulated else None,
    )


def runs_of(question: Question) -> int:
    """Runs of cells, warm-up included."""
    return sum(map(len, question.grid.groups())) * (question.warm_up + question.repeats)


def _read(engine: EagleJaxEngine, question: Question, name: str) -> _Set:
    prompts = read_prompts(name, question.limit, vocab_size=engine.vocab_size, chat=question.chat)
    return _Set(prompts, engine.encode([prompt.content for prompt in prompts]))


def _possible(
    engine: EagleJaxEngine, question: Question, group: Sequence[Cell], chosen: _Set, room: dict[Any, str]
) -> tuple[list[Cell], list[Skipped]]:
    """The cells of a group that can be measured; none where plain decoding cannot."""
    long = too_long(chosen.prompts, chosen.ids, question.sampling.max_new_tokens, engine.max_len)
    reasons = [long or room.get(cell.spec) or _ungrowable(engine, cell) for cell in group]
    if reasons[0] is not None:
        cell = group[0]
        return [], [
            Skipped(f"{cell.prompts}, {cell.slots} slots, temperature {cell.temperature:g}: all cells", reasons[0])
        ]
    refused = [Skipped(cell.describe(), why) for cell, why in zip(group, reasons, strict=True) if why]
    return [cell for cell, why in zip(group, reasons, strict=True) if not why], refused


def _ungrowable(engine: EagleJaxEngine, cell: Cell) -> str | None:
    """Why this pair cannot grow the cell's tree."""
    try:
        engine.check_speculation(cell.spec)
    except ConfigError as error:
        return str(error)
    return None


def _measure(
    engine: EagleJaxEngine,
    question: Question,
    cells: Sequence[Cell],
    chosen: _Set,
    clock: CompileClock,
    done: Callable[[Cell], object],
) -> tuple[list[CellResult], list[Skipped]]:
    """The cells of one group, plain decoding first."""
    ids = fill_waves(chosen.ids, engine.slots)
    names = tuple(chosen.prompts[index % len(chosen.prompts)].name for index in range(len(ids)))
    asked = replace(question.sampling, temperature=cells[0].temperature)
    if question.simulated is not None:
        asked = replace(asked, ignore_eos=True)

    def run(cell: Cell, sampling: Sampling) -> Run:
        made = run_once(engine, ids, sampling, cell.spec, clock)
        done(cell)
        return made

    short = replace(asked, max_new_tokens=min(WARM_UP_TOKENS, asked.max_new_tokens))
    warm: dict[Cell, float] = {}
    skipped = []
    for cell in cells:
        try:
            warm[cell] = sum(run(cell, short).compile_seconds for _ in range(question.warm_up))
        except JaxRuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            skipped.append(Skipped(cell.describe(), f"ran out of memory: {' '.join(str(error).split())[:160]}"))
    if cells[0] not in warm:
        return [], [*skipped, *(Skipped(cell.describe(), "nothing to compare with") for cell in cells if cell in warm)]
    runs = alternate({cell: lambda cell=cell: run(cell, asked) for cell in warm}, repeats=question.repeats, warm_up=0)
    rates = tuple(question.simulated.rates) if question.simulated else None
    plain = CellResult(cells[0], tuple(runs[cells[0]]), names, None, warm[cells[0]])
    others = [cell for cell in warm if cell is not cells[0]]
    return [plain, *(CellResult(c, tuple(runs[c]), names, plain, warm[c], rates) for c in others)], skipped


def _warnings(question: Question, results: Sequence[CellResult]) -> list[str]:
    found = []
    if question.random_weights and question.simulated is None:
        found.append(RANDOM_WEIGHTS_WARNING)
    elif RANDOM in question.grid.prompts and question.simulated is None:
        found.append(RANDOM_WARNING)
    for result in results:
        # what random weights say means nothing, and goes round in circles by nature
        if result.repeated and not question.random_weights and not result.simulated:
            names = ", ".join(result.repeated[:4]) + (", .." if len(result.repeated) > 4 else "")
            found.append(
                f"{result.cell.describe()}: {len(result.repeated)} answers are mostly one repeated n-gram ({names}), on which drafts look "
                f"splendid: tau {result.acceptance.tau:.2f} with them, {result.acceptance_without_repeated.tau:.2f} without"
            )
    return found
