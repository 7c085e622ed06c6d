"""The audit's other parts: the control's rate, the routers' margins, the judge, and plain decoding with dummy rows."""

import jax.numpy as jnp
import kit_m
import numpy as np
import pairs
import pytest

from eaglejax import Sampling
from eaglejax.generation import Generation, Stats
from eaglejax.measure.check import _padded
from eaglejax.measure.judge import Judge
from eaglejax.measure.lossless import Rate, Row, failures, make_jobs, rate_of
from eaglejax.measure.rounding import Divergence, edge_distance
from eaglejax.models.config import MoEConfig
from eaglejax.models.moe import route, watching_routers

ROUNDED, WRONG = Divergence(0, 3, 5, 6, 0.1, "score"), Divergence(0, 3, 5, 6, 5.0, "")


def rows(found: int, control: int, tokens: int = 1000) -> list[Row]:
    return [
        Row("chain", 1, "T=0", tokens, 50, 100, [ROUNDED] * found),
        Row("control", 1, "T=0", tokens, 0, 100, [ROUNDED] * control),
    ]


def test_bfloat16_is_judged_against_its_control():
    """At most 1.5 times the control's rate; above it by so few that chance explains it is undecided, not wrong."""
    assert failures(rows(30, 30), "bfloat16") == [] and failures(rows(0, 0), "bfloat16") == []
    assert "3.00 times as many" in failures(rows(90, 30), "bfloat16")[0]
    few = rate_of(rows(2, 1))
    assert few is not None and few.undecided and not few.too_high and failures(rows(2, 1), "bfloat16") == []
    assert "more tokens would tell" in few.told()
    assert Rate(20, 1000, 0, 1000).too_high  # none at all in the control
    # what no rounding explains is wrong at any rate
    odd = rows(0, 9)
    odd[0].divergences.append(WRONG)
    assert "not rounding" in failures(odd, "bfloat16")[0]
    # the float32 rule does not look at a control
    assert "at most 1" in failures(rows(2, 9), "float32")[0]


def test_the_distance_to_a_filters_edge():
    scaled = np.array([4.0, 3.0, 2.5, 1.0], np.float32)
    assert edge_distance(scaled, Sampling(temperature=1.0), (0, 1)) == np.inf
    assert edge_distance(scaled, Sampling(temperature=1.0, top_k=2), (0, 1)) == pytest.approx(0.5)
    assert edge_distance(scaled, Sampling(temperature=1.0, top_k=2), (0, 2)) == pytest.approx(0.5)
    assert edge_distance(scaled, Sampling(temperature=1.0, top_k=2), (0, 3)) == pytest.approx(1.5)


@pytest.mark.parametrize("groups", [1, 2])
def test_router_margins(groups):
    """How far the last chosen score is above the first one left out, experts and groups alike."""
    config = MoEConfig(8, 2, 4, score="sigmoid", groups=groups, topk_groups=1)
    logits = np.random.default_rng(0).normal(0, 1, (5, 8)).astype(np.float32)
    with watching_routers() as watched:
        chosen, _ = route(jnp.asarray(logits), config)
    route(jnp.asarray(logits), config)  # outside nothing is watched
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    wanted = []
    if groups == 2:
        totals = np.sort(scores.reshape(5, 2, 4), -1)[..., -2:].sum(-1)
        wanted.append(np.abs(totals[:, 0] - totals[:, 1]))
        keep = np.repeat(totals == totals.max(-1, keepdims=True), 4, axis=-1)
        scores = np.where(keep, scores, -np.inf)
    ranked = np.sort(scores, -1)
    wanted.append(ranked[:, -2] - ranked[:, -3])
    assert len(watched.margins) == len(wanted)
    assert len(watched.experts) == 1 and np.array_equal(watched.experts[0], chosen)
    for found, want in zip(watched.margins, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(found), want, atol=1e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.write_random(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def answer(prompt, ids) -> Generation:
    return Generation("", list(ids), "length", None, prompt, Stats(0, len(prompt), len(ids), []))


def test_the_judge_looks_with_float32(folders):
    """In bfloat16 it widens the very weights that are served; a made-up token is told from a near-tie."""
    engine = pairs.load(*folders, dtype="bfloat16")
    judge, prompt = Judge(engine._pair), pairs.prompts([9])[0]
    exact, own, margin = judge.look(prompt)
    error, served = np.abs(exact - own).max(), engine.score(prompt).logits[-1]
    # programs of bfloat16 round at other places; the float32 one is nearer to both than their scale of 8 * 2^-8
    assert 0 < error < 0.1 and np.abs(exact - served).max() < 0.1 and 0 < margin < 1
    best = np.argsort(-exact)
    wrong = judge.divergence(0, answer(prompt, [int(best[0])]), answer(prompt, [int(best[-1])]), Sampling())
    assert wrong is not None and wrong.gap == pytest.approx(exact[best[0]] - exact[best[-1]])
    assert wrong.limit == pytest.approx(2 * error) and wrong.cause == ("router" if margin < 2**-7 else "")
    assert judge.divergence(0, answer(prompt, [1]), answer(prompt, [1]), Sampling()) is None


def test_in_float32_the_judge_is_the_engines_own_score(folders):
    engine = pairs.load(*folders)
    prompt = pairs.prompts([9])[0]
    exact, own, _ = Judge(engine._pair).look(prompt)
    np.testing.assert_array_equal(exact, own)
    np.testing.assert_allclose(exact, engine.score(prompt).logits[-1], atol=1e-5)


def test_dummy_rows_change_no_token(tmp_path):
    """The control: plain decoding that runs four rows a step, in float32 the same tokens, one a cycle."""
    p = kit_m.sharp(pairs.around())
    engine = pairs.load(*pairs.write_ring(tmp_path, p, p), speculation=None, slots=2)
    jobs = make_jobs([[5, 9], [20]], 12, ["T=0"])
    prompts, samplings = [ids for ids, _ in jobs], [asked for _, asked in jobs]
    plain = engine.generate(prompts, samplings)
    padded = _padded(engine, 4)(prompts, samplings)
    assert pairs.ids(padded) == pairs.ids(plain) and pairs.counts(padded) == pairs.counts(plain)
