"""Router arithmetic against float64, with vectors on which each known wrong variant goes another way."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eaglejax.models.config import MoEConfig
from eaglejax.models.moe import route


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(values, count):
    """Ids of the largest values, equal ones by lower id, in ascending order."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def reference(logits, config, bias=None, *, group_score="two", masked=-np.inf, bias_in_weights=False):
    """One row in float64; the keywords give the wrong variants that releases have had."""
    logits = logits.astype(np.float64)
    if config.score == "sigmoid":
        scores = sigmoid(logits)
    elif config.score == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    else:
        scores = logits
    choice = scores if bias is None else scores + bias.astype(np.float64)
    if config.groups > 1:
        grouped = choice.reshape(config.groups, -1)
        ordered = np.sort(grouped, axis=1)
        total = ordered[:, -2:].sum(1) if group_score == "two" else ordered[:, -1]
        kept = best(total, config.topk_groups)
        choice = np.where(np.isin(np.arange(config.groups), kept)[:, None], grouped, masked).reshape(-1)
    ids = best(choice, config.topk)
    weights = (scores + bias if bias_in_weights else scores)[ids]
    if config.score == "softmax_topk":
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    elif config.normalise:
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * config.scaling


def check(logits, config, bias=None):
    ids, weights = route(jnp.asarray(logits), config, None if bias is None else jnp.asarray(bias))
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    for row, line in enumerate(logits):
        want_ids, want_weights = reference(line, config, bias)
        np.testing.assert_array_equal(ids[row], want_ids)
        np.testing.assert_allclose(weights[row], want_weights, atol=1e-6, rtol=1e-6)
    return np.asarray(ids)


def grouped(**changes) -> MoEConfig:
    base = dict(
        experts=16, topk=4, width=8, score="sigmoid", groups=4, topk_groups=2, correction_bias=True, scaling=2.5
    )
    return MoEConfig(**(base | changes))


def draw(rows=64, count=16, scale=2.0, seed=0):
    return (scale * np.random.default_rng(seed).standard_normal((rows, count))).astype(np.float32)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("groups, kept", [(4, 2), (4, 1), (1, 1), (2, 2)])
def test_grouped_sigmoid(normalise, scaling, groups, kept):
    bias = draw(1, seed=1)[0] * 0.2
    check(draw(), grouped(normalise=normalise, scaling=scaling, groups=groups, topk_groups=kept), bias)


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax(normalise):
    check(draw(), MoEConfig(experts=16, topk=4, width=8, normalise=normalise))


def test_softmax_over_the_chosen():
    check(draw(), MoEConfig(experts=16, topk=4, width=8, score="softmax_topk"))


def test_all_biases_negative():
    """Corrected scores all below 0: masked groups must be -inf; with 0 they would win."""
    bias = np.linspace(-3.0, -1.5, 16).astype(np.float32)
    logits, config = draw(), grouped()
    ids = check(logits, config, bias)
    wrong = np.stack([reference(line, config, bias, masked=0.0)[0] for line in logits])
    assert (ids != wrong).any(axis=1).all()


def test_group_score_is_the_sum_of_the_best_two():
    logits, config = draw(), grouped()
    bias = np.zeros(16, np.float32)
    ids = check(logits, config, bias)
    wrong = np.stack([reference(line, config, bias, group_score="max")[0] for line in logits])
    assert (ids != wrong).any(axis=1).sum() > 10


def test_bias_chooses_and_does_not_weigh():
    bias = (0.5 * draw(1, seed=2)[0]).astype(np.float32)
    logits, config = draw(), grouped(normalise=False)
    check(logits, config, bias)
    _, weights = route(jnp.asarray(logits), config, jnp.asarray(bias))
    wrong = np.stack([reference(line, config, bias, bias_in_weights=True)[1] for line in logits])
    assert np.abs(np.asarray(weights) - wrong).max(axis=1).min() > 0.01


def test_large_biases_with_tiny_scores():
    """Biases 7.00 to 7.06: bfloat16 has two values there, and score + bias - bias would be rounding noise."""
    bias = np.linspace(7.0, 7.06, 16).astype(np.float32)
    rng = np.random.default_rng(3)
    scores = 10.0 ** rng.uniform(-8, -0.1, (64, 16))
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    config = grouped(groups=1, topk_groups=1)
    ids = check(logits, config, bias)
    rounded = bias.astype(ml_dtypes.bfloat16).astype(np.float32)
    wrong = np.stack([reference(line, config, rounded)[0] for line in logits])
    assert len(np.unique(rounded)) <= 3 and (ids != wrong).any(axis=1).sum() > 10


def test_equal_scores_go_to_the_lower_id():
    config = MoEConfig(experts=16, topk=4, width=8)
    check(np.zeros((3, 16), np.float32), config)
    check(np.tile(np.array([[0.0, 1.0]], np.float32), (1, 8)), config)
    # equal groups as well
    check(np.zeros((2, 16), np.float32), grouped(), np.zeros(16, np.float32))


def test_scores_that_all_underflow():
    """Sigmoid of -200 is 0 in float32: the weights are 0 and not NaN."""
    _, weights = route(jnp.full((1, 16), -200.0), grouped(), jnp.zeros(16))
    np.testing.assert_array_equal(weights, 0)


def test_every_expert_chosen_in_order():
    ids = check(draw(8), MoEConfig(experts=16, topk=16, width=8))
    np.testing.assert_array_equal(ids, np.tile(np.arange(16), (8, 1)))
