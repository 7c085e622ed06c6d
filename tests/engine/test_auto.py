"""speculation="auto": the tokens of plain decoding whatever is chosen, a draft that can resume at any time, and a bounded loss."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pairs
import pytest

from eaglejax import Auto, Sampling, Speculation
from eaglejax.errors import ConfigError
from eaglejax.measure.cycle_costs import forced, measure_costs, measured_modes
from eaglejax.speculation.adapt import ALLOWANCE, PRIOR, SHARE, make_policy, prior_policy

sys.path.insert(0, str(Path(__file__).parent))

AUTO = Auto((Speculation(3, 1), Speculation(2, 2, 5)), window=8)
SAMPLINGS = [Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, temperature=0.8, top_k=20, seed=3)]


def begin(engine, asked, sampling, spec=AUTO):
    programs = engine._programs_for(spec)
    request, padded = pairs.request_of(programs, asked, sampling, len(asked))
    return programs, pairs.prefilled(programs, programs.start(request, padded), padded.shape[1])


def run(programs, state, policy, cycles=1):
    return programs.decode(state, cycles, np.zeros(state.length.shape[0], bool), programs.place_policy(policy))


@pytest.mark.parametrize(
    ("name", "sampling"), [("latent", SAMPLINGS[0]), pytest.param("grouped", SAMPLINGS[1], marks=pytest.mark.slow)]
)
def test_any_order_of_choices_makes_the_same_text_and_leaves_true_caches(request, name, sampling):
    random_engine = request.getfixturevalue(name)
    asked = pairs.prompts([3, 9])
    plain = random_engine.generate(asked, sampling, speculation=None)
    programs, state = begin(random_engine, asked, sampling)
    rng = np.random.default_rng(4)
    # long stretches of plain decoding fill the window more than once
    order = [*rng.integers(0, 3, 6), *[0] * 19, 2, *rng.integers(0, 3, 4), *[0] * 40]
    for choice in order:
        state = run(programs, state, forced(prior_policy(AUTO), int(choice)))
        if choice:
            assert int(state.pending_count.max()) <= AUTO.num_steps + 1
    for slot, answer in enumerate(plain):
        prompt = len(asked[slot])
        assert [int(i) for i in state.tokens[slot, prompt : int(state.length[slot])]] == answer.token_ids
    if sampling.temperature == 0:
        programs, state = begin(random_engine, asked, replace(sampling, max_new_tokens=100))
        for choice in order[:28]:
            state = run(programs, state, forced(prior_policy(AUTO), int(choice)))
        assert int(state.pending_count.max()) > 0
        assert pairs.caches_are_fresh(programs, pairs.snapshot(state))


@pytest.mark.slow
def test_generate_counts_the_cycles_of_every_choice(random_pairs):
    engine = pairs.load(*random_pairs["qwen3_moe"], speculation=AUTO, tuning="none")
    asked = pairs.prompts([3, 17, 9])
    answers = engine.generate(asked, SAMPLINGS[0])
    assert pairs.ids(answers) == pairs.ids(engine.generate(asked, SAMPLINGS[0], speculation=None))
    for answer in answers:
        assert sum(answer.stats.cycles_by_choice) == answer.stats.cycles
    assert sum(sum(answer.stats.cycles_by_choice[1:]) for answer in answers) > 0
    assert pairs.ids(engine.generate(asked, SAMPLINGS[1])) == pairs.ids(
        engine.generate(asked, SAMPLINGS[1], speculation=None)
    )


@pytest.fixture(scope="module")
def long_engine(random_pairs):
    return pairs.load(*random_pairs["qwen3_moe"], speculation=None, max_len=700, slots=1, tuning="none")


TABLES = make_policy([[0.5, 0.25, 0.12], [0.7, 0.4]], [1.3, 1.35], 0.2, 0.1, 0.5)
LONG = Auto(AUTO.trees)  # with the default window


def spoiled(engine):
    """The draft with the ids of its head mixed up: it guesses nothing, and its cache holds the same rows."""
    import copy

    from flax import nnx

    graph, arrays = nnx.split(engine._pair.draft)
    draft = nnx.merge(graph, copy.deepcopy(arrays))
    draft.target_ids[...] = (draft.target_ids[...] + 31) % pairs.VOCAB
    return draft


def test_an_answer_begins_with_what_the_last_one_showed(long_engine):
    """Greedy and sampled waves apart, until the draft is another; the text is the same from any beginning."""
    spec = long_engine.check_speculation(AUTO)
    experience = lambda sampled: long_engine._adaptive.experience(spec, sampled)
    asked, draft = pairs.prompts([9]), long_engine._pair.draft
    long_engine.use_draft(spoiled(long_engine))
    first = long_engine.generate(asked, SAMPLINGS[0], speculation=AUTO)
    # nothing was accepted: the text looks hard, and what might be lost is spent
    assert experience(False).weights[-3:].sum() > sum(PRIOR[-3:]) and experience(False).credit < ALLOWANCE
    np.testing.assert_array_equal(experience(True).weights, np.asarray(PRIOR, np.float32))
    again = long_engine.generate(asked, SAMPLINGS[0], speculation=AUTO)
    assert pairs.ids(again) == pairs.ids(first)
    grown = lambda answers: sum(sum(answer.stats.cycles_by_choice[1:]) for answer in answers)
    assert 0 < grown(first) and grown(again) < grown(first)
    long_engine.use_draft(draft)
    np.testing.assert_array_equal(experience(False).weights, np.asarray(PRIOR, np.float32))


def test_speculation_that_cannot_pay_loses_little_and_resumes_when_it_can(long_engine):
    """300 tokens on which the draft is always wrong, then 300 on which it is right: resumed within 64, as good as from a fresh start."""
    asked, sampling = pairs.prompts([5]), Sampling(max_new_tokens=640, ignore_eos=True)
    programs, state = begin(long_engine, asked, sampling, LONG)
    programs.use_draft(spoiled(long_engine))
    while int(state.length[0]) < 300:
        state = run(programs, state, TABLES, 15)
    made, spent = int(state.length[0]) - 6, float(state.belief.spent[0])
    windows = made // LONG.window + 1
    assert spent - made <= ALLOWANCE + SHARE * spent + windows * float(TABLES.catch_up) + 0.5
    wasted = int(state.belief.used[0, 1:].sum())
    assert wasted <= 8

    programs.use_draft(long_engine._pair.draft)
    before = int(state.length[0])
    while int(state.belief.used[0, 1:].sum()) == wasted:
        state = run(programs, state, TABLES, 2)
    assert int(state.length[0]) - before <= 64
    here = pairs.committed(pairs.snapshot(state), 0)

    def tail(programs, state):
        cycles = int(state.cycles[0])
        state = run(programs, state, forced(TABLES, 1), 30)
        return [int(a) for a in state.accepted[0, cycles : int(state.cycles[0])]]

    _, fresh = begin(long_engine, [here[:-1]], sampling, LONG)
    assert pairs.committed(pairs.snapshot(fresh), 0) == here
    resumed = tail(programs, state)
    assert resumed == tail(programs, fresh) and sum(resumed) > 10


def test_the_tables_change_without_a_compile_and_costs_decide(grouped):
    asked, sampling = pairs.prompts([4, 5]), Sampling(max_new_tokens=30)
    dear = make_policy([[0.6, 0.4, 0.2], [0.7, 0.4]], [9.0, 9.0], 0.2, 0.1, 0.6)
    cheap = make_policy([[0.6, 0.4, 0.2], [0.7, 0.4]], [1.05, 1.5], 0.2, 0.1, 0.6)
    used = []
    for tables in (dear, cheap):
        programs, state = begin(grouped, asked, sampling)
        state = run(programs, state, tables, 6)
        used.append([int(n) for n in state.belief.used[0]])
        # a look of its own only before plain cycles and at the call's beginning: a tree's cycle ends with one, whichever comes next
        alone = float(state.belief.spent[0]) - float(np.asarray(state.belief.used[0]) @ np.asarray(tables.cost))
        assert -1e-3 < alone < float(tables.look) * (used[-1][0] + 1) + 1e-3
    assert used[0] == [6, 0, 0] and used[1][1] > 3


def test_costs_are_measured_with_the_program_that_decodes(grouped):
    programs = grouped._programs_for(AUTO)
    costs = measure_costs(programs, 2)
    assert (
        len(costs.trees) == 2
        and min(costs.trees) > 0
        and costs.catch_up >= 0
        and costs.look >= 0
        and costs.plain_ms > 0
    )


def test_a_mode_that_is_timed_pays_for_itself_alone(grouped):
    """In the order in which they are timed no tree finds more rows waiting than it takes along."""
    spec = Auto(AUTO.trees)  # the usual window
    programs, state = begin(grouped, pairs.prompts([4, 5]), Sampling(max_new_tokens=100), spec)
    prior = prior_policy(spec)
    look = float(prior.look)
    own = [6.0, 6 * (1 + float(prior.catch_up)), 6 * (1 + look), *(look + 6 * float(cost) for cost in prior.cost[1:])]
    for _ in range(2):
        for mode, cost in zip(measured_modes(spec), own, strict=True):
            before = float(state.belief.spent[0])
            state = run(programs, state, mode, 6)
            assert float(state.belief.spent[0]) - before == pytest.approx(cost, rel=1e-5)


@pytest.mark.parametrize(
    "trees", [(), (Speculation(num_steps=0),), (Speculation(2, 1),) * 2, tuple(Speculation(n, 1) for n in range(1, 6))]
)
def test_impossible_choices_are_refused(trees):
    with pytest.raises(ConfigError):
        Auto(trees)
    with pytest.raises(ConfigError, match="window"):
        Auto((Speculation(5, 1),), window=6)
