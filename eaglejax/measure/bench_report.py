"""A bench's result as a text table, as JSON, and as rows of a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.measure.acceptance import Acceptance
from eaglejax.measure.bench_grid import Cell
from eaglejax.measure.bench_result import BenchResult, CellResult, best, verdict
from eaglejax.measure.environment import environment_line
from eaglejax.measure.timing import Spread

HEADERS = (
    "prompts",
    "slots",
    "T",
    "tree",
    "tokens/s",
    "ratio",
    "tau",
    "ms/cycle",
    "tau/cycle",
    "first token",
    "compile",
    "tokens",
)
LEFT = {0, 3, 11}  # columns of words


def to_text(result: BenchResult) -> str:
    """For people: the environment, the table, acceptance by level, the best tree of each batch, warnings, definitions."""
    parts = [_head(result), _table(result), _levels(result), _phases(result), "\n".join(map(verdict, result.groups()))]
    if result.skipped:
        parts.append("\n".join(["Skipped:", *(f"  {one.cell}: {one.reason}" for one in result.skipped)]))
    if result.warnings:
        parts.append("\n".join(f"warning: {line}" for line in result.warnings))
    width = max(map(len, result.definitions))
    parts.append("\n".join(f"{name:<{width}}  {meaning}" for name, meaning in result.definitions.items()))
    return "\n\n".join(part for part in parts if part)


def simulated_note(rates: Sequence[float] | None) -> str:
    """What every output says where acceptance was made up; empty where it was not."""
    if not rates:
        return ""
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"SIMULATED acceptance (conditional rates by level {shown}; the last holds for deeper levels)"


def _head(result: BenchResult) -> str:
    settings = result.settings
    spread = settings["prompts_of_each_set"]
    lines = [
        f"{result.environment['model']}, draft {settings['draft']}{', RANDOM weights' if settings['random_weights'] else ''}: "
        f"{environment_line(result.environment)}",
        f"prompts {', '.join(settings['prompts'])} ({spread} of each), {settings['max_new_tokens']} new tokens at most, "
        f"{'chat template' if settings['chat_template'] else 'no chat template'}, seed {settings['seed']}; "
        f"repeats in turn: {settings['repeats']}, turns of warm-up before them: {settings['warm_up_turns']}",
    ]
    if note := simulated_note(result.simulated):
        lines.insert(0, f"{note}: times are real, tau, ratios and tokens are not those of a draft")
    return "\n".join(lines)


def _table(result: BenchResult) -> str:
    rows = [HEADERS, *(_row(cell) for cell in result.cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    align = lambda text, column: text.ljust(widths[column]) if column in LEFT else text.rjust(widths[column])
    lines = ["  ".join(align(text, column) for column, text in enumerate(row)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(result: CellResult) -> tuple[str, ...]:
    cell, ratio = result.cell, result.ratio
    return (
        cell.prompts,
        str(cell.slots),
        f"{cell.temperature:g}",
        cell.tree + (" SIMULATED" if result.simulated else ""),
        _spread(result.tokens_per_second, 1),
        "1" if result.plain is None else _spread(ratio, 2),
        _shown(result.acceptance.tau, 2),
        _shown(result.cycle_ms.median, 2),
        _shown(result.predicted_tokens_per_second, 1),
        _shown(result.first_token_ms.median, 1),
        _shown(result.compile_seconds, 1),
        _compared(result),
    )


def _compared(result: CellResult) -> str:
    if result.plain is None:
        return "-"
    if result.simulated:
        return "not compared"
    return "same" if result.difference is None else f"differ: {result.difference.describe()}"


def _spread(spread: Spread, digits: int) -> str:
    return f"{_shown(spread.median, digits)} ({_shown(spread.low, digits)}-{_shown(spread.high, digits)})"


def _shown(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _levels(result: BenchResult) -> str:
    """Acceptance by level of every tree, both ways."""
    lines = []
    for cell in (cell for cell in result.cells if cell.plain is not None):
        found = cell.acceptance
        lines.append(
            f"  {cell.cell.describe()}: of all {_percents(found.unconditional)}; of reaching {_percents(found.conditional)}"
        )
    simulated = f", {simulated_note(result.simulated)}" if result.simulated else ""
    return "\n".join([f"Accepted at level 1, 2, .. in %{simulated}:", *lines]) if lines else ""


def _phases(result: BenchResult) -> str:
    """Draft, verification and the rest of every cell of which they were measured."""
    lines = [
        f"  {cell.cell.describe()}: draft {cell.phases.draft:.2f}, verify {cell.phases.verify:.2f}, "
        f"other {cell.cycle_ms.median - cell.phases.draft - cell.phases.verify:.2f} of {cell.cycle_ms.median:.2f}"
        for cell in result.cells
        if cell.phases is not None
    ]
    return "\n".join(["Phases of a cycle in ms:", *lines]) if lines else ""


def _percents(shares: Iterable[float]) -> str:
    return " ".join("-" if math.isnan(x) else f"{100 * x:.0f}" for x in shares)


def to_json(result: BenchResult) -> dict[str, Any]:
    """For machines; NaN is null."""
    return _plain_numbers(
        {
            "simulated_acceptance": result.simulated,
            "environment": result.environment,
            "settings": result.settings,
            "definitions": result.definitions,
            "cells": [_cell(cell) for cell in result.cells],
            "best": [
                {
                    "prompts": group[0].cell.prompts,
                    "slots": group[0].cell.slots,
                    "temperature": group[0].cell.temperature,
                    "tree": None if (found := best(group)) is None else found.cell.tree,
                    "verdict": verdict(group),
                }
                for group in result.groups()
            ],
            "skipped": [{"cell": one.cell, "reason": one.reason} for one in result.skipped],
            "warnings": list(result.warnings),
        }
    )


def _named(cell: Cell) -> dict[str, Any]:
    """The setting of a cell, by the names of the flags."""
    return {
        "prompts": cell.prompts,
        "slots": cell.slots,
        "temperature": cell.temperature,
        "num_steps": cell.spec.num_steps,
        "topk": cell.spec.topk,
        "num_draft_tokens": cell.spec.nodes,
    }


def _cell(result: CellResult) -> dict[str, Any]:
    cell, difference = result.cell, result.difference
    return {
        **_named(cell),
        "simulated_acceptance": result.simulated,
        "tokens_per_second": result.tokens_per_second.to_json(),
        "ratio_to_plain": result.ratio.to_json(),
        "acceptance": _acceptance(result.acceptance),
        "cycle_ms": result.cycle_ms.to_json(),
        "draft_ms": None if result.phases is None else result.phases.draft,
        "verify_ms": None if result.phases is None else result.phases.verify,
        "predicted_tokens_per_second": result.predicted_tokens_per_second,
        "first_token_ms": result.first_token_ms.to_json(),
        "compile_seconds": result.compile_seconds,
        "runs": [
            {
                "answers": len(run.answers),
                "tokens": run.tokens,
                "decode_tokens": run.decode_tokens,
                "decode_seconds": run.decode_seconds,
                "tokens_per_second": run.tokens_per_second,
                "tokens_per_second_with_prefill": run.tokens_per_second_with_prefill,
                "cycles": run.cycles,
                "live_slots": run.live_slots,
                "compile_seconds": run.compile_seconds,
            }
            for run in result.runs
        ],
        "tokens_equal_plain": None if result.plain is None or result.simulated else difference is None,
        "first_difference": None if difference is None else vars(difference),
        "repeated_answers": list(result.repeated),
        "acceptance_without_repeated_answers": _acceptance(result.acceptance_without_repeated),
    }


def _acceptance(found: Acceptance) -> dict[str, Any]:
    return {
        "tau": found.tau,
        "accepted_per_cycle": found.accepted_per_cycle,
        "cycles": found.cycles,
        "by_level_of_all_cycles": found.unconditional,
        "by_level_of_cycles_that_reach_it": found.conditional,
    }


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numbers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_rows(result: BenchResult) -> list[dict[str, Any]]:
    """A row per cell, with what tells one file's rows from another's."""
    shared = {name: result.environment[name] for name in ("model", "device_kind", "devices", "dtype")}
    shared |= {name: result.settings[name] for name in ("draft", "random_weights")}
    return [{**shared, **_csv_row(cell)} for cell in result.cells]


def _csv_row(result: CellResult) -> dict[str, Any]:
    cell, found = result.cell, result.acceptance
    several = lambda shares: " ".join(f"{x:.4f}" for x in shares)
    row: dict[str, Any] = {
        **_named(cell),
        "simulated_acceptance": several(result.simulated or ()),
    }
    for name, spread in (
        ("tokens_per_second", result.tokens_per_second),
        ("ratio_to_plain", result.ratio),
        ("cycle_ms", result.cycle_ms),
        ("first_token_ms", result.first_token_ms),
    ):
        row |= {name: spread.median, f"{name}_min": spread.low, f"{name}_max": spread.high}
    return row | {
        "tau": found.tau,
        "accepted_by_level_of_all_cycles": several(found.unconditional),
        "accepted_by_level_of_cycles_that_reach_it": several(found.conditional),
        "draft_ms": None if result.phases is None else result.phases.draft,
        "verify_ms": None if result.phases is None else result.phases.verify,
        "compile_seconds": result.compile_seconds,
        "tokens": _compared(result),
        "repeated_answers": len(result.repeated),
        "tau_without_repeated_answers": result.acceptance_without_repeated.tau,
    }


def write_csv(result: BenchResult, path: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    rows = csv_rows(result)
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError("cannot be written", where=path, found=error.strerror) from None
