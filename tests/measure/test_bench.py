"""The bench on a small Mixtral pair: plain and trees on the same prompts, what does not fit told with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.errors import ConfigError, PromptError
from eaglejax.measure import bench, bench_fit
from eaglejax.measure.bench import Question, run_bench, runs_of
from eaglejax.measure.bench_grid import PLAIN, Cell, Grid
from eaglejax.measure.bench_report import to_json, to_text
from eaglejax.sharding.fit import Pool
from eaglejax.speculation.simulated import SimulatedAcceptance

CHAIN = Speculation(3, 1)
ASKED = Sampling(max_new_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(data: Path) -> EagleJaxEngine:
    folder = data / "e2e_mixtral"
    return EagleJaxEngine.from_pretrained(
        str(folder / "target"), draft=str(folder / "draft"), speculation=None, max_len=48, slots=1
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "three.jsonl"
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([5, 9, 100, 3], [7], [40, 41, 90])))
    return str(file)


def question(prompts: str, *trees: Speculation, **changes) -> Question:
    grid = Grid((prompts,), trees, (2,), (0.8,))
    return Question(grid, ASKED, limit=0, repeats=2, draft_name="small", **changes)


def test_plain_and_speculative_in_one_run(engine, prompts):
    asked, runs = question(prompts, CHAIN, phases=True), []
    found = run_bench(engine, asked, done=runs.append)
    plain, chain = found.cells
    assert [cell.spec for cell in runs] == [PLAIN, CHAIN] * 3 and len(runs) == runs_of(asked)  # they take turns
    assert plain.cell.spec == PLAIN and chain.plain is plain
    assert len(chain.names) == 4 and chain.names[3] == f"{prompts}[0]"  # the second wave is filled up
    assert chain.difference is None and 1 < chain.acceptance.tau <= 4 and plain.acceptance.tau == 1
    # what the engine says by itself
    alone = engine.variant(slots=2).generate([[5, 9, 100, 3], [7]], Sampling(**{**vars(ASKED), "temperature": 0.8}))
    assert [a.token_ids for a in chain.runs[0].answers[:2]] == [a.token_ids for a in alone]
    assert plain.phases is not None and plain.phases.draft == 0 and plain.phases.verify > 0
    assert chain.phases is not None and chain.phases.draft > 0 and chain.phases.verify > 0
    # compilation: in the warm-up, told apart, and nowhere else
    assert plain.warm_up_compile > 0 and chain.warm_up_compile > 0
    assert all(run.decode_tokens == 4 * 11 and run.decode_seconds > 0 for cell in found.cells for run in cell.runs)
    said = to_json(found)
    assert said["settings"]["warm_up_turns"] == 1 and said["settings"]["slots"] == [2]
    assert said["environment"]["dtype"] == "float32" and said["environment"]["versions"]["jax"]
    assert "same" in to_text(found) and not found.warnings


def test_trial_37_the_plain_row_is_the_plain_mode(engine):
    assert engine.programs(None) is engine.programs(Speculation(num_steps=0)) is engine.programs(PLAIN)


@pytest.mark.slow
def test_simulated_acceptance(engine, prompts):
    found = run_bench(engine, question(prompts, CHAIN, simulated=SimulatedAcceptance((1.0, 1.0, 0.0)), warm_up=0))
    plain, chain = found.cells
    assert chain.acceptance.tau == 3 and chain.acceptance.conditional == (1, 1, 0) and plain.acceptance.tau == 1
    assert found.simulated == (1.0, 1.0, 0.0) and chain.simulated and plain.simulated is None
    assert chain.difference is None and "not compared" in to_text(found)


def test_what_cannot_be_measured_is_told_and_the_rest_runs(engine, prompts, monkeypatch):
    served = engine.variant(slots=2)
    state, temporaries = bench_fit.cell_bytes(served, PLAIN)
    more, _ = bench_fit.cell_bytes(served, CHAIN)
    assert more > state > 0
    monkeypatch.setattr(bench_fit, "pools_of", lambda devices: [Pool("small", 1, state + temporaries + 100)])
    found = run_bench(engine, question(prompts, CHAIN, warm_up=0))
    assert [cell.cell.spec for cell in found.cells] == [PLAIN]
    # trial 38: without warm-up compilation is in the first turn, and still in no rate: it takes longer than a dozen steps of this model
    first, second = found.cells[0].runs
    assert found.cells[0].warm_up_compile == 0 and first.compile_seconds > 0 and second.compile_seconds == 0
    assert first.decode_seconds + sum(first.first_token) < first.compile_seconds + 50 * second.decode_seconds
    assert f"does not fit the memory: {more:,} bytes" in found.skipped[0].reason and found.skipped[0].cell.endswith(
        "3,1,4"
    )
    monkeypatch.setattr(bench_fit, "pools_of", lambda devices: [Pool("tiny", 1, 10)])
    with pytest.raises(ConfigError, match="no cell could be measured.*does not fit the memory.* 10 free"):
        run_bench(engine, question(prompts, CHAIN))


def test_prompts_that_are_too_long_leave_their_set_out(engine, prompts):
    asked = question(prompts)
    long = Question(Grid((prompts, "random"), (), (2,), (0.8,)), Sampling(max_new_tokens=46), warm_up=0)
    with pytest.raises(PromptError, match="too long"):  # longer than max_len by itself
        run_bench(engine, long)
    with pytest.raises(
        ConfigError, match=r"three.jsonl\[0\] has 4 tokens, which with 46 new ones are more than max_len 48"
    ):
        run_bench(engine, Question(asked.grid, Sampling(max_new_tokens=46), warm_up=0))


def test_random_prompts_are_warned_of():
    grid = Grid(("random", "qa"), (CHAIN,), (1,), (0.0,))
    assert bench._warnings(Question(grid, ASKED), []) == [bench.RANDOM_WARNING]
    assert bench._warnings(Question(grid, ASKED, simulated=SimulatedAcceptance((0.5,))), []) == []
    assert bench._warnings(Question(grid, ASKED, random_weights=True), []) == [bench.RANDOM_WEIGHTS_WARNING]


def test_trees_that_a_pair_cannot_grow(engine, data):
    cell = lambda *tree: Cell("qa", 1, 0.0, Speculation(*tree))
    alone = EagleJaxEngine.from_pretrained(str(data / "e2e_mixtral" / "target"), max_len=32, slots=1)
    assert "a tree needs a draft" in str(bench._ungrowable(alone, cell(3, 1, 4)))
    assert bench._ungrowable(engine, cell(3, 1, 4)) is None and bench._ungrowable(alone, cell(0, 1, 1)) is None
