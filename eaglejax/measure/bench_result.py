"""What a bench found: cells with their figures, which is best, what was skipped, and the words that the figures are meant in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eaglejax.measure import acceptance
from eaglejax.measure.acceptance import Acceptance, share
from eaglejax.measure.bench_grid import Cell, Skipped
from eaglejax.measure.bench_run import Run
from eaglejax.measure.phases import Phases
from eaglejax.measure.repetition import mostly_repeated
from eaglejax.measure.timing import Spread

DEFINITIONS = {
    "tree": "num_steps,topk,num_draft_tokens; the root counts among the nodes; plain: no draft, measured by the same code",
    "tokens/s": "new tokens after the first of each answer, over the seconds of decoding; median (min-max) of the repeats; no compilation",
    "ratio": "tokens/s over those of plain decoding in the same turn; median (min-max)",
    "tau": acceptance.TAU,
    "ms/cycle": "decoding over rounds of the compiled loop, all slots together; median",
    "draft, verify": "ms of a round of each in a compiled loop of its own, at the prompts' length; other: ms/cycle less both (--phases)",
    "tau/cycle": "tokens/s that tau, the mean live slots and ms/cycle make; above the measured by what a stop or the budget cuts off",
    "first token": "milliseconds from asking a wave of requests to its first tokens (prefill); median over waves",
    "compile": "seconds of tracing and compiling, warm-up included; in no other figure",
    "tokens": "new token ids compared with plain decoding's, request by request: same, or where they differ first",
    "accepted, of all": acceptance.UNCONDITIONAL,
    "accepted, of reaching": acceptance.CONDITIONAL,
}


@dataclass(frozen=True)
class Difference:
    """The first place where an answer leaves plain decoding's; a token is None where that answer had ended."""

    prompt: str
    position: int  # new tokens before it
    plain: int | None
    found: int | None

    def describe(self) -> str:
        return f"{self.prompt} token {self.position}: {self.found} for {self.plain}"


@dataclass(frozen=True)
class CellResult:
    """A cell's runs. `names`: the prompt of each answer. `plain`: the group's plain decoding; None in that cell itself.
    `warm_up_compile`: seconds. `simulated`: rates of acceptance that were made up, by level. `phases`: where they were asked for."""

    cell: Cell
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    plain: CellResult | None
    warm_up_compile: float
    simulated: tuple[float, ...] | None = None
    phases: Phases | None = None

    @cached_property
    def tokens_per_second(self) -> Spread:
        return Spread.of([run.tokens_per_second for run in self.runs])

    @cached_property
    def ratio(self) -> Spread:
        """To plain decoding, turn by turn; 1 for plain decoding."""
        base = self if self.plain is None else self.plain
        pairs = zip(self.runs, base.runs, strict=True)
        return Spread.of([share(run.tokens_per_second, other.tokens_per_second) for run, other in pairs])

    @cached_property
    def cycle_ms(self) -> Spread:
        return Spread.of([run.cycle_seconds * 1e3 for run in self.runs])

    @cached_property
    def first_token_ms(self) -> Spread:
        return Spread.of([wave * 1e3 for run in self.runs for wave in run.first_token])

    @property
    def compile_seconds(self) -> float:
        return self.warm_up_compile + math.fsum(run.compile_seconds for run in self.runs)

    @cached_property
    def acceptance(self) -> Acceptance:
        """Of all answers."""
        return self._acceptance(range(len(self.names)))

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """Prompts whose answer is mostly one repeated n-gram."""
        return tuple(dict.fromkeys(self.names[index] for index in self._looping))

    @cached_property
    def acceptance_without_repeated(self) -> Acceptance:
        return self._acceptance([index for index in range(len(self.names)) if index not in self._looping])

    @cached_property
    def predicted_tokens_per_second(self) -> float:
        """See DEFINITIONS, "tau/cycle"."""
        tau = self.acceptance.tau
        return Spread.of([share(tau * run.live_slots, run.cycle_seconds) for run in self.runs]).median

    @cached_property
    def difference(self) -> Difference | None:
        """From plain decoding; None where all tokens of all repeats are the same, and where there is nothing to compare."""
        if self.plain is None or self.simulated:
            return None
        for run, other in zip(self.runs, self.plain.runs, strict=True):
            for name, one, two in zip(self.names, run.answers, other.answers, strict=True):
                if one.token_ids != two.token_ids:
                    return _difference(name, two.token_ids, one.token_ids)
        return None

    @cached_property
    def _looping(self) -> frozenset[int]:
        return frozenset(
            index
            for index in range(len(self.names))
            if any(mostly_repeated(run.answers[index].token_ids) for run in self.runs)
        )

    def _acceptance(self, indices: Sequence[int]) -> Acceptance:
        counts = [run.answers[index].stats.accepted_per_cycle for run in self.runs for index in indices]
        return Acceptance.of(counts, self.cell.spec.num_steps)


def _difference(prompt: str, plain: Sequence[int], found: Sequence[int]) -> Difference:
    same = next((i for i, (a, b) in enumerate(zip(plain, found, strict=False)) if a != b), min(len(plain), len(found)))
    at = lambda ids: ids[same] if same < len(ids) else None
    return Difference(prompt, same, at(plain), at(found))


@dataclass(frozen=True)
class BenchResult:
    """`settings`: prompts, budget, repeats and the like, by name. `environment`: see `environment.py`."""

    cells: tuple[CellResult, ...]
    skipped: tuple[Skipped, ...]
    settings: dict[str, Any]
    environment: dict[str, Any]
    warnings: tuple[str, ...] = ()
    simulated: tuple[float, ...] | None = None
    definitions: dict[str, str] = field(default_factory=lambda: DEFINITIONS)

    def groups(self) -> list[list[CellResult]]:
        """Cells that are compared with each other, plain decoding first."""
        found: dict[Any, list[CellResult]] = {}
        for result in self.cells:
            found.setdefault(result.cell.group, []).append(result)
        return list(found.values())


def best(group: Sequence[CellResult]) -> CellResult | None:
    """The tree with the most tokens/s beside plain decoding; None where none has more than that."""
    of = lambda result: 0 if math.isnan(result.ratio.median) else result.ratio.median
    fastest = max(group, key=of)
    return None if fastest.plain is None else fastest


def verdict(group: Sequence[CellResult]) -> str:
    """In words, for one prompt set, number of slots and temperature."""
    prompts, slots, temperature = group[0].cell.group
    where = f"{prompts}, {slots} slot{'s' if slots > 1 else ''}, temperature {temperature:g}: "
    simulated = " (SIMULATED acceptance)" if group[-1].simulated else ""
    if len(group) == 1:
        return f"{where}only plain decoding was measured"
    found = best(group)
    if found is None:
        close = any(each.ratio.high > 1 for each in group if each.cell.spec.num_steps)
        doubt = "; within the spread of the repeats" if close else ""
        return f"{where}no draft is faster than plain decoding{doubt}{simulated}"
    ratio = found.ratio
    doubt = "; within the spread of the repeats" if ratio.low <= 1 else ""
    doubt = "; one repeat, so no spread is known" if len(found.runs) == 1 else doubt
    return f"{where}best is {found.cell.tree}, {ratio.median:.2f} x plain ({ratio.low:.2f}-{ratio.high:.2f}){doubt}{simulated}"
