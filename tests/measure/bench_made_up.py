"""Results of a bench made by hand: counts and times that every figure can be worked out from."""

from __future__ import annotations

from typing import Any

from eaglejax import Generation, Speculation
from eaglejax.generation import Stats
from eaglejax.measure.bench_grid import PLAIN, Cell, Skipped
from eaglejax.measure.bench_result import BenchResult, CellResult
from eaglejax.measure.bench_run import Run

NAMES = ("qa[0]", "qa[5]")
TEXT = list(range(100, 125))
CHAIN, TREE = Speculation(5, 1), Speculation(2, 2, 6)


def answer(counts: list[int], ids: list[int]) -> Generation:
    stats = Stats(0, 4, len(ids), counts, prefill_seconds=0.5, decode_seconds=2.0)
    return Generation("", ids, "length", None, [1, 2, 3, 4], stats)


def run(counts: list[list[int]], seconds: float, ids: list[list[int]] | None = None, compiling: float = 0.0) -> Run:
    """Two answers in two waves of one slot."""
    ids = ids or [TEXT, TEXT]
    answers = tuple(answer(c, i) for c, i in zip(counts, ids, strict=True))
    return Run(answers, (0.25, 0.75), seconds, sum(map(len, counts)), compiling)


def result(simulated: tuple[float, ...] | None = None, **changes: Any) -> BenchResult:
    """Plain decoding at 12 tokens/s, a chain at 24 and 18, a tree at 6 that leaves the plain text."""
    cell = lambda spec: Cell("qa", 1, 0.0, spec)
    ones = [[0] * 24] * 2
    plain = CellResult(cell(PLAIN), (run(ones, 4.0), run(ones, 4.0)), NAMES, None, 1.5)
    counts = [[3, 0, 1, 5] + [1] * 6, [2] * 10]
    chain = CellResult(
        cell(CHAIN), (run(counts, 2.0), run(counts, 8 / 3, compiling=0.25)), NAMES, plain, 2.5, simulated
    )
    other = run([[1] * 12, [2] * 8], 8.0, [TEXT, [*TEXT[:7], 5]])
    tree = CellResult(cell(TREE), (other, other), NAMES, plain, 3.0, simulated)
    settings = {
        "draft": "d", "random_weights": False, "prompts": ["qa"], "prompts_of_each_set": 2, "chat_template": True,
        "max_new_tokens": 25, "seed": 0, "repeats": 2, "warm_up_turns": 1,
    }  # fmt: skip
    environment = {
        "model": "m", "device_kind": "cpu", "platform": "cpu", "devices": 1, "cores": 2, "mesh": None, "dtype": "float32",
        "xla_flags": None, "versions": {"python": "3", "jax": "0"},
    }  # fmt: skip
    skipped = (Skipped("every cell of the tree 1,2,9", "num_draft_tokens: the tree cannot be filled"),)
    values: dict[str, Any] = dict(cells=(plain, chain, tree), skipped=skipped, warnings=("something",))
    return BenchResult(**values | changes, settings=settings, environment=environment, simulated=simulated)
