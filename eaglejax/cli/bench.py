"""`eaglejax bench`: plain and speculative decoding side by side on named prompts; a table, JSON, CSV and plots."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl.flags import FlagValues

from eaglejax.cli.flags import UsageError, given
from eaglejax.cli.settings import read_settings
from eaglejax.cli.values import tree_numbers, wrong_usage
from eaglejax.config import Speculation, real_number, whole_number
from eaglejax.measure.bench_grid import Grid, grid_of_trees, make_grid, possible_trees
from eaglejax.measure.outputs import check_file
from eaglejax.run_config import RunConfig

if TYPE_CHECKING:
    from eaglejax.engine import EagleJaxEngine
    from eaglejax.measure.bench_result import BenchResult

GROUPS = ("bench", "bench model", "bench output", "run")
AXES = ("num_steps", "topk", "num_draft_tokens")
OWN = (*AXES, "slots", "temperature")  # lists here
DEFAULT_STEPS = "1,3,5"
MOST_REPEATS = 1000


def main(flags: FlagValues) -> int:
    settings = read_settings(flags, own=OWN)
    shape = is_shape(settings.model)
    drafted = settings.draft is not None or (shape and flags["draft"].value is None)
    grid = _grid(flags, settings, shape=shape, drafted=drafted)
    numbers, rates = _numbers(flags), _rates(flags)
    _check_together(settings, grid, rates)
    _check_inputs(flags, grid)

    # jax from here on
    from eaglejax.cli.compile_cache import use_compile_cache
    from eaglejax.cli.progress import progress
    from eaglejax.measure.bench import Question, run_bench, runs_of
    from eaglejax.speculation.simulated import SimulatedAcceptance

    use_compile_cache()
    engine, draft_name = _open(settings, grid, flags, shape=shape, seed=numbers["seed"])
    if flags["report"].value:
        print(engine.load_report, file=sys.stderr)
    question = Question(
        grid,
        replace(settings.sampling, seed=numbers["seed"]),
        limit=numbers["limit"],
        repeats=numbers["repeats"],
        warm_up=numbers["warm_up"],
        chat=flags["chat"].value is not False,
        simulated=SimulatedAcceptance(rates) if rates else None,
        draft_name=draft_name,
        random_weights=shape,
        phases=bool(flags["phases"].value),
    )
    with progress("bench", runs_of(question), silent_until_done=True) as advance:
        result = run_bench(engine, question, done=lambda cell: advance(1))
    _tell(flags, result)
    if (grid.trees or grid.skipped) and all(cell.plain is None for cell in result.cells):
        reasons = "; ".join(f"{one.cell}: {one.reason}" for one in result.skipped)
        print(f"error: bench: no tree that was asked for could be measured; found {reasons}", file=sys.stderr)
        return 1
    return 0


def _check_together(settings: RunConfig, grid: Grid, rates: list[float]) -> None:
    """Flags that are possible each by itself. Raises UsageError."""
    if settings.sampling.max_new_tokens < 2:
        raise UsageError(
            "--max_new_tokens: the first token comes from the prefill, so nothing would be decoded; "
            f"found {settings.sampling.max_new_tokens}; expected 2 or more"
        )
    if settings.sampling.max_new_tokens >= settings.max_len:
        raise UsageError(
            "--max_new_tokens: no prompt has room beside so many; "
            f"found {settings.sampling.max_new_tokens}; expected less than --max_len, {settings.max_len}"
        )
    if rates and not grid.trees:
        raise UsageError("--simulate_acceptance: acceptance belongs to a tree, and only plain decoding is measured")


def _check_inputs(flags: FlagValues, grid: Grid) -> None:
    """Refuse, before anything is loaded, prompt sets that are not there or hold a broken line, and outputs that could not be written."""
    from eaglejax.measure.prompt_sets import check_prompts

    for name in grid.prompts:
        check_prompts(name)
    if (table := given(flags, "csv")) is not None:
        check_file(Path(table), f"csv: {table}", replaced=False)
    if (folder := given(flags, "plots")) is not None:
        from eaglejax.measure.bench_plots import check_plots

        check_plots(Path(folder))


def _tell(flags: FlagValues, result: BenchResult) -> None:
    from eaglejax.measure.bench_plots import draw_plots
    from eaglejax.measure.bench_report import to_json, to_text, write_csv

    print(json.dumps(to_json(result)) if flags["json"].value else to_text(result), flush=True)
    if (table := given(flags, "csv")) is not None:
        write_csv(result, Path(table))
    if (folder := given(flags, "plots")) is not None:
        for path in draw_plots(result, Path(folder)):
            print(path, file=sys.stderr)


def is_shape(model: str) -> bool:
    """Whether a model is named by its config alone, a built-in one or a file, so that its weights are made at random."""
    from eaglejax.sharding.model_names import known_models

    path = Path(model)
    return path.suffix == ".json" or (not path.exists() and model.lower() in known_models())


def _grid(flags: FlagValues, settings: RunConfig, *, shape: bool, drafted: bool) -> Grid:
    """The cells asked for. Raises UsageError."""
    axes: dict[str, Any] = {
        "prompts": _list(flags, "prompts") or ["random" if shape else "mt_bench"],
        "slots": _list(flags, "slots") or [1],
        "temperatures": _list(flags, "temperature") or [settings.sampling.temperature],
    }
    trees, numbers = given(flags, "tree"), {name: _list(flags, name) for name in AXES}
    asked = [name for name in AXES if numbers[name] is not None]
    if trees and asked:
        raise UsageError(f"--tree and --{asked[0]} exclude each other: trees, or a grid of their numbers")
    if trees:
        specs, skipped = possible_trees([tree_numbers(text) for text in trees])
        grid = wrong_usage(lambda: grid_of_trees(specs, skipped=skipped, **axes))
    elif asked or (settings.speculation == "auto" and drafted):
        grid = wrong_usage(
            lambda: make_grid(
                num_steps=numbers["num_steps"] or DEFAULT_STEPS.split(","),
                topk=numbers["topk"] or [1],
                num_draft_tokens=numbers["num_draft_tokens"] or [None],
                **axes,
            )
        )
    else:  # the file's own tree, or none
        spec = settings.speculation if isinstance(settings.speculation, Speculation) else None
        grid = wrong_usage(lambda: grid_of_trees([spec] if spec else [], **axes))
    plain_asked = any(not tree_numbers(text)[0] for text in trees) if trees else "0" in (numbers["num_steps"] or ())
    if grid.skipped and not grid.trees and not plain_asked:
        reasons = "; ".join(f"{one.cell}: {one.reason}" for one in grid.skipped)
        raise UsageError(f"--{'tree' if trees else asked[0]}: no tree that can be; found {reasons}")
    if grid.trees and not drafted:
        raise UsageError("--draft: a tree needs a draft, and none is named; for plain decoding alone: --num_steps=0")
    return grid


def _list(flags: FlagValues, name: str) -> list[str] | None:
    """The values of a flag that takes several; None where it was not given. Raises UsageError for one without a value."""
    text = flags[name].value
    if text is None:
        return None
    values = [part.strip() for part in text.split(",")]
    if not all(values):
        raise UsageError(f"--{name}: an empty grid, or an empty value in it; found {text!r}; expected such as 1,3,5")
    return values


def _numbers(flags: FlagValues) -> dict[str, int]:
    whole = lambda name, default, low, most: whole_number(name, given(flags, name) or default, low, most)
    return wrong_usage(
        lambda: {
            "limit": whole("limit", 8, 0, None),
            "repeats": whole("repeats", 3, 1, MOST_REPEATS),
            "warm_up": whole("warm_up", 1, 0, MOST_REPEATS),
            "seed": whole("seed", 0, 0, 2**63 - 1),
        }
    )


def _rates(flags: FlagValues) -> list[float]:
    name = "simulate_acceptance"
    return wrong_usage(lambda: [real_number(name, text, 0, 1) for text in _list(flags, name) or ()])


def _open(
    settings: RunConfig, grid: Grid, flags: FlagValues, *, shape: bool, seed: int
) -> tuple[EagleJaxEngine, str | None]:
    """The engine, and what its draft is called. Its slots are the fewest of the grid: what more cells need is looked at cell by cell."""
    from eaglejax.engine import EagleJaxEngine

    if not shape:
        asked = settings.engine_arguments() | {"slots": min(grid.slots), "speculation": None}
        return EagleJaxEngine.from_pretrained(**asked), settings.draft
    from eaglejax.measure.random_pair import random_engine

    if settings.capture != "auto" or settings.draft_config:
        raise UsageError("--capture and --draft_config are for drafts with weights; this model is its config alone")
    draft = settings.draft or ("auto" if flags["draft"].value is None and grid.trees else None)
    return random_engine(settings, draft, slots=min(grid.slots), seed=seed)
