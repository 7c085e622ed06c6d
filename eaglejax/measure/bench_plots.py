"""Pictures of a bench: speed-up by tree and batch, acceptance by level, the cost of a cycle. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.measure.bench_report import simulated_note
from eaglejax.measure.bench_result import BenchResult, CellResult
from eaglejax.measure.outputs import check_folder

NAMES = ("speedup", "acceptance", "cost")


def check_plots(folder: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn or written. Raises ConfigError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib is missing", where="plots", fix="pip install 'eaglejax[plots]', or leave --plots out"
        )
    check_folder(folder, f"plots: {folder}")


def draw_plots(result: BenchResult, folder: Path) -> list[Path]:
    """Writes speedup.png, acceptance.png and cost.png; returns their paths. `check_plots` has been called.

    Where only plain decoding was measured there is nothing to draw, and nothing is written.
    """
    if all(cell.plain is None for cell in result.cells):
        return []
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  # without pyplot: no window, no global state

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in zip(NAMES, (_speedup, _acceptance, _cost), strict=True):
        figure = Figure(layout="constrained")
        draw(figure, result)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _title(result: BenchResult, what: str) -> str:
    note = simulated_note(result.simulated)
    lines = [what, f"{result.environment['model']}, {result.environment['device_kind']}, {result.environment['dtype']}"]
    return "\n".join((textwrap.wrap(note, 60) if note else []) + lines)


def _group_name(result: CellResult) -> str:
    prompts, slots, temperature = result.cell.group
    return f"{prompts}, {slots} slots, T {temperature:g}"


def _speedup(figure: Any, result: BenchResult) -> None:
    """A heat map: trees along, batches down; white is as fast as plain decoding."""
    trees = list(dict.fromkeys(cell.cell.tree for cell in result.cells if cell.plain is not None))
    groups = result.groups()
    found = {(cell.cell.group, cell.cell.tree): cell.ratio.median for cell in result.cells}
    grid = [[found.get((group[0].cell.group, tree), math.nan) for tree in trees] for group in groups]
    figure.set_size_inches(max(6.5, 3 + 0.9 * len(trees)), 2.5 + 0.5 * len(groups))
    axes = figure.add_subplot()
    reach = max((abs(x - 1) for row in grid for x in row if not math.isnan(x)), default=0.1) or 0.1
    image = axes.imshow(grid, cmap="RdBu", vmin=1 - reach, vmax=1 + reach, aspect="auto")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            dark = not math.isnan(value) and abs(value - 1) > 0.6 * reach
            shown = "-" if math.isnan(value) else f"{value:.2f}"
            axes.text(x, y, shown, ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(trees)), trees, rotation=45, ha="right")
    axes.set_yticks(range(len(groups)), [_group_name(group[0]) for group in groups])
    axes.set_xlabel("num_steps,topk,num_draft_tokens")
    axes.set_title(_title(result, "tokens/s over plain decoding"), fontsize=9)
    figure.colorbar(image, ax=axes)


def _acceptance(figure: Any, result: BenchResult) -> None:
    """Both readings of acceptance, side by side."""
    figure.set_size_inches(10, 4.5)
    left, right = figure.subplots(1, 2, sharey=True)
    for cell in (cell for cell in result.cells if cell.plain is not None):
        levels = range(1, cell.cell.spec.num_steps + 1)
        label = f"{cell.cell.tree} ({_group_name(cell)})"
        left.plot(levels, cell.acceptance.unconditional, marker="o", label=label)
        right.plot(levels, cell.acceptance.conditional, marker="o")
    left.set_title("of all cycles", fontsize=9)
    right.set_title("of the cycles that reach the level", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("level")
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("share accepted")
    left.set_ylim(0, 1.02)
    figure.legend(fontsize=6, loc="outside lower center", ncols=3)
    figure.suptitle(_title(result, "acceptance by level"), fontsize=9)


def _cost(figure: Any, result: BenchResult) -> None:
    """What a cycle takes, by the nodes it verifies; plain decoding is one node. Chains are joined, trees stand by themselves."""
    figure.set_size_inches(7, 4.5)
    axes = figure.add_subplot()
    for number, group in enumerate(result.groups()):
        for tree in (False, True):
            cells = [cell for cell in group if (cell.cell.spec.topk > 1) == tree]
            cells.sort(key=lambda cell: cell.cell.spec.nodes)
            if not cells:
                continue
            nodes, middle = [cell.cell.spec.nodes for cell in cells], [cell.cycle_ms.median for cell in cells]
            reach = [
                [cell.cycle_ms.median - cell.cycle_ms.low for cell in cells],
                [cell.cycle_ms.high - cell.cycle_ms.median for cell in cells],
            ]
            label = f"{_group_name(group[0])}, {'trees' if tree else 'plain and chains'}"
            axes.errorbar(
                nodes, middle, yerr=reach, fmt="s" if tree else "o-", color=f"C{number}", capsize=3, label=label
            )
            for cell, x, y in zip(cells, nodes, middle, strict=True):
                axes.annotate(cell.cell.tree, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7)
    axes.set_xlabel("nodes verified per cycle, root included")
    axes.set_ylabel("ms per cycle (min to max)")
    axes.set_ylim(bottom=0)
    axes.set_title(_title(result, "cost of a cycle, drafting included"), fontsize=9)
    axes.legend(fontsize=7)
