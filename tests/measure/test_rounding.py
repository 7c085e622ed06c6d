"""What the audit calls rounding, on made-up logits, and that it finds a fault that is put in."""

import math

import numpy as np
import pytest

from eaglejax import Sampling
from eaglejax.measure import lossless, rounding

LOGITS = np.array([4.0, 3.99995, 3.0, 2.0, -1.0], np.float32)
QUIET = np.zeros(5, np.float32)


def examine(sampling, pair, logits=LOGITS, noise=QUIET):
    return rounding.examine(logits, noise, sampling, pair)


def test_greedy_near_tie_is_rounding_and_a_gap_is_not():
    gap, cause = examine(Sampling(), (0, 1))
    assert cause == "score" and gap == pytest.approx(5e-5, rel=0.01)
    assert examine(Sampling(), (0, 2)) == (pytest.approx(1), "")


def test_both_must_be_near_the_best_not_only_near_each_other():
    """Two losers that tie are no rounding: plain decoding itself would have to be wrong."""
    logits = np.array([4.0, 2.0, 2.0], np.float32)
    assert examine(Sampling(), (1, 2), logits, np.zeros(3, np.float32))[1] == ""


def test_sampling_compares_perturbed_scores():
    noise = np.array([0, 0, 1 / 0.8, 0, 0], np.float32)  # lifts token 2 to token 0's score
    sampling = Sampling(temperature=0.8)
    assert examine(sampling, (0, 2), noise=noise)[1] == "score"
    assert examine(sampling, (0, 2))[1] == ""
    assert examine(sampling, (0, 3), noise=noise)[1] == ""


def test_a_filter_edge_explains_only_its_own_token():
    """Top-k 2, tokens 1 and 2 tied at the edge: either may be in and win by its noise; token 3 may not."""
    logits = np.array([4.0, 3.0, 2.99995, 2.0], np.float32)
    noise = np.array([0, 5, 9, 20], np.float32)
    sampling = Sampling(temperature=1, top_k=2)
    gap, cause = examine(sampling, (1, 2), logits, noise)
    assert (gap, cause) == (0, "filter")
    assert examine(sampling, (1, 3), logits, noise) == (math.inf, "")
    apart = logits + np.array([0, 0.1, 0, 0], np.float32)
    assert examine(sampling, (1, 2), apart, noise) == (math.inf, "")


@pytest.mark.parametrize(("top_p", "cause"), [(0.75, "filter"), (0.7, ""), (0.8, "")])
def test_top_p_edge(top_p, cause):
    """Probabilities 1/2, 1/4, 1/8, ..: with top-p 0.75 rounding says whether the third token is in."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32)) - np.array([0, 0, 0, 0.01], np.float32)
    logits = np.log(np.exp(logits) / np.exp(logits).sum()) + np.float32(1)
    share = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    if top_p == 0.75:
        top_p = float(share[:2].sum())
    noise = np.array([0, 9, 20, 0], np.float32)
    # below the edge the third token is out for certain; above it, in for certain, and then it wins by far
    assert examine(Sampling(temperature=1, top_p=top_p), (1, 2), logits, noise)[1] == cause


def test_min_p_edge():
    logits = np.log(np.array([1.0, 0.5, 0.1], np.float32))
    noise = np.array([0, 9, 20], np.float32)
    assert examine(Sampling(temperature=1, min_p=0.1), (1, 2), logits, noise)[1] == "filter"
    assert examine(Sampling(temperature=1, min_p=0.2), (1, 2), logits, noise)[1] == ""


def test_sure_and_possible_candidates_frame_the_engines_filters():
    """The audit's filters, written apart from the engine's, agree with them wherever no edge is near."""
    import jax.numpy as jnp

    from eaglejax.speculation.programs import empty_request
    from eaglejax.speculation.sampling import apply_filters

    rng = np.random.default_rng(0)
    for _ in range(20):
        scaled = rng.normal(0, 3, 40).astype(np.float32)
        k, p, m = int(rng.integers(0, 20)), float(rng.uniform(0.5, 1)), float(rng.uniform(0, 0.1))
        request = empty_request(1)
        for name, value in (("top_k", k), ("top_p", p), ("min_p", m)):
            object.__setattr__(request, name, jnp.asarray([value], getattr(request, name).dtype))
        kept = np.isfinite(np.asarray(apply_filters(jnp.asarray(scaled[None, None]), request))[0, 0])
        sure, may = rounding.candidates(scaled, Sampling(temperature=1, top_k=k, top_p=p, min_p=m))
        assert not (sure & ~kept).any() and not (kept & ~may).any()
        assert may.sum() - sure.sum() <= 1  # and they frame it closely


def test_answers_of_different_length_diverge_at_the_end_of_the_shorter():
    assert rounding.first_difference([1, 2, 3], [1, 2]) == 2
    assert rounding.first_difference([1, 2], [1, 3]) == 1
    assert rounding.first_difference([1, 2], [1, 2]) is None


def row(divergences, tokens=9_000, accepted=50):
    return lossless.Row("chain", 1, "T=0", tokens, accepted, 100, divergences)


ROUNDED = rounding.Divergence(0, 3, 5, 6, 1e-6, "score")
WRONG = rounding.Divergence(0, 3, 5, 6, 0.5, "")


def test_verdict():
    assert lossless.failures([row([])], "float32", 1.05) == []
    assert lossless.failures([row([ROUNDED])], "float32", 1.05) == []
    assert "not rounding" in lossless.failures([row([WRONG])], "float32", 1.05)[0]
    assert "at most 1" in lossless.failures([row([ROUNDED] * 2)], "float32", 1.05)[0]
    assert lossless.failures([row([ROUNDED] * 2, tokens=10_001)], "float32", 1.05) == []
    assert "tau 1.00" in lossless.failures([row([], accepted=0)], "float32", 1.05)[0]
