"""Trials 30 and 32: sampled text has the target's distribution and depends on its seed alone."""

import kit_m
import numpy as np
import pairs
import pytest
from scipy import stats

from eaglejax import Sampling, Speculation

STATES = 8
TREE = Speculation(2, 3, 8)
HOT = (1.0, 0.7)


def matrices(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """P and Q over the first 8 ids, each other id (never met) leading back to them; Q differs from P."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(2):
        matrix = np.full((64, 64), 1e-12)
        matrix[:, :STATES] = rng.dirichlet(np.full(STATES, 1.5), 64)
        out.append(matrix / matrix.sum(-1, keepdims=True))
    p, q = out
    return p, 0.5 * p + 0.5 * q


P, Q = matrices()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stochastic")
    return str(kit_m.write_target(folder / "target", P, layers=3)), pairs.write_draft(folder / "draft", Q)


@pytest.fixture(scope="module")
def engine(folders):
    return pairs.load(*folders, max_len=256, slots=16)


def tempered(matrix: np.ndarray, temperature: float) -> np.ndarray:
    rows = matrix[:STATES, :STATES] ** (1 / temperature)
    return rows / rows.sum(-1, keepdims=True)


def sample(engine, temperature: float, draws: int, spec, first_seed: int = 1):
    """Answers of 250 tokens from every state in turn, `draws` tokens in all."""
    count = -(-draws // 250)
    asked = [Sampling(max_new_tokens=250, temperature=temperature, seed=first_seed + i) for i in range(count)]
    return engine.generate([[i % STATES] for i in range(count)], asked, speculation=spec)


def transitions(answers, places=lambda answer: range(len(answer.token_ids))) -> np.ndarray:
    """[from, to] counts of the tokens at the given places of each answer."""
    table = np.zeros((64, 64), int)
    for answer in answers:
        text = answer.prompt_token_ids + answer.token_ids
        first = len(answer.prompt_token_ids)
        for place in places(answer):
            table[text[first + place - 1], text[first + place]] += 1
    return table


def fits(table: np.ndarray, rows: np.ndarray) -> float:
    """p of the chi-square test of all rows together."""
    assert table[STATES:].sum() == table[:, STATES:].sum() == 0
    expected = table[:STATES].sum(-1, keepdims=True) * rows
    keep = expected >= 5
    statistic = ((table[:STATES, :STATES] - expected) ** 2 / expected)[keep].sum()
    freedom = int(keep.sum() - (keep.sum(-1) > 0).sum())
    return float(stats.chi2.sf(statistic, freedom))


def after_full_cycles(answer) -> list[int]:
    """Places of the bonus tokens that follow a fully accepted chain of three."""
    places, at = [], 1
    for accepted in answer.stats.accepted_per_cycle:
        at += accepted
        if accepted == 3 and at < len(answer.token_ids):
            places.append(at)
        at += 1
    return places


def first_drafts(answers, temperature: float) -> float:
    """z of the accepted first drafts: argmax(log P / T + g) == argmax(log Q / T + g) with the same noise g."""
    p, q = tempered(P, temperature), tempered(Q, temperature)
    # with shared Gumbel noise both pick x with probability 1 / sum_y max(p_y / p_x, q_y / q_x)
    ratios = np.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None]).sum(-1)
    rate = (1 / ratios).sum(-1)
    hits = mean = variance = 0.0
    for answer in answers:
        at = 0
        for accepted in answer.stats.accepted_per_cycle:
            chance = rate[answer.token_ids[at]]
            hits, mean, variance = hits + (accepted > 0), mean + chance, variance + chance * (1 - chance)
            at += accepted + 1
    return (hits - mean) / np.sqrt(variance)


@pytest.mark.parametrize("temperature", HOT[:1])
def test_trial_30_transitions_follow_the_target(engine, temperature):
    """20,000 draws of a chain: every row of P, the bonus tokens by themselves, the acceptance of the coupled rule."""
    answers = sample(engine, temperature, 20_000, pairs.CHAIN)
    rows = tempered(P, temperature)
    assert fits(transitions(answers), rows) > 0.001
    bonus = transitions(answers, after_full_cycles)
    assert bonus.sum() > 1500 and fits(bonus, rows) > 0.001
    assert abs(first_drafts(answers, temperature)) < 4
    assert np.mean([answer.stats.tau for answer in answers]) > 2
    # the judge would see a draft's distribution in place of the target's
    assert fits(transitions(answers), tempered(Q, temperature)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("spec", [Speculation(1, 1), pairs.CHAIN, pairs.SEVEN, TREE], ids=Speculation.describe)
@pytest.mark.parametrize("known", [None, [0, 2, 3, 5]], ids=["whole", "cut"])
@pytest.mark.parametrize("temperature", HOT)
def test_trial_30_at_full_size(folders, tmp_path, spec, known, temperature):
    """200,000 draws each; a draft of four ids leaves the mass outside them reachable."""
    draft = pairs.write_draft(tmp_path / "draft", Q, ids=known)
    engine = pairs.load(folders[0], draft, max_len=256, slots=16)
    answers = sample(engine, temperature, 200_000, spec)
    assert fits(transitions(answers), tempered(P, temperature)) > 0.001
    assert np.mean([answer.stats.tau for answer in answers]) > 1.2
    if known is None and spec.topk == 1:
        assert abs(first_drafts(answers, temperature)) < 4


def test_trial_30_sampled_text_is_that_of_plain_decoding(engine):
    """Plain, chain and tree draw the same noise, so they say the same, token for token, under filters too."""
    asked = [Sampling(max_new_tokens=60, temperature=1.0, seed=s) for s in range(8)]
    asked += [Sampling(max_new_tokens=60, temperature=1.5, top_k=5, seed=s) for s in range(4)]
    asked += [Sampling(max_new_tokens=60, temperature=1.2, top_p=0.7, min_p=0.05, seed=s) for s in range(4)]
    starts = [[i % STATES] for i in range(16)]
    plain = engine.generate(starts, asked, speculation=None)
    for spec, least in ((pairs.CHAIN, 1.8), (TREE, 1.8)):
        found = engine.generate(starts, asked, speculation=spec)
        assert pairs.ids(found) == pairs.ids(plain)
        assert np.mean([answer.stats.tau for answer in found]) > least


def hot(seed: int | None, tokens: int = 40) -> Sampling:
    return Sampling(max_new_tokens=tokens, temperature=1.0, seed=seed)


def test_trial_32_seeds_hold_for_each_request(engine):
    """(a-c) A seed gives the same tokens twice, beside any neighbours, in any slot and alone; another seed does not."""
    order = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    first = pairs.ids(engine.generate([[3]] * 9, [hot(s) for s in order]))
    assert first[0] == first[8] and len({tuple(t) for t in first[:8]}) == 8
    mixed = [8, 3, 1, 7, 2, 5, 4, 6, 9]
    second = pairs.ids(engine.generate([[3]] * 9, [hot(s) for s in mixed]))
    assert [second[mixed.index(s)] for s in range(1, 9)] == first[:8]
    (alone,) = engine.generate([[3]], hot(1))
    assert alone.token_ids == first[0] and alone.stats.seed == 1 and alone.stats.tau > 1.3


def test_trial_32_unseeded_requests_are_not_alike(engine):
    """(d) 64 requests without a seed: all different, each with its seed told, together the target's distribution."""
    answers = engine.generate([[3]] * 64, hot(None, 60))
    assert len({tuple(answer.token_ids) for answer in answers}) == 64
    assert len({answer.stats.seed for answer in answers}) == 64
    # drawn afresh in every run, hence the wide margin
    assert fits(transitions(answers), tempered(P, 1.0)) > 1e-7
    again = engine.generate([[3]] * 16, [hot(answer.stats.seed, 60) for answer in answers[:16]])
    assert pairs.ids(again) == pairs.ids(answers[:16])


def test_trial_32_greedy_text_has_no_seed(engine):
    """(e) Temperature 0 with any seed is temperature 0 without."""
    asked = [Sampling(max_new_tokens=40, seed=s) for s in [None, *range(15)]]
    greedy = pairs.ids(engine.generate([[3]] * 16, asked))
    assert all(answer == greedy[0] for answer in greedy)
