"""The chunked loss against plain autodiff and finite differences, whatever the chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.training import losses
from eaglejax.training.losses import OBJECTIVES, row_losses, vocabulary_loss

ROWS, WIDTH, VOCAB = 13, 6, 20
ALL = jnp.arange(ROWS, dtype=jnp.int32)


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    soft = jax.nn.softmax(2 * draw(ROWS, VOCAB), axis=-1)
    return draw(ROWS, WIDTH), draw(VOCAB, WIDTH), soft, jnp.asarray(rng.random(ROWS) < 0.7)


def plain(objective, hidden, head, soft, counted):
    logits = jnp.einsum("nd,wd->nw", hidden, head)
    return jnp.sum(jnp.where(counted, row_losses(objective, logits, soft), 0))


@pytest.mark.parametrize("chunk", [VOCAB, 3 * VOCAB, 1 << 24])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_are_those_of_all_rows_at_once(parts, monkeypatch, objective, chunk):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    hidden, head, soft, counted = parts
    whole = lambda h, w: 3 * vocabulary_loss(h, w, soft, ALL, counted, objective=objective)[0]
    value, grads = jax.value_and_grad(whole, argnums=(0, 1))(hidden, head)
    expected, wanted = jax.value_and_grad(lambda h, w: 3 * plain(objective, h, w, soft, counted), argnums=(0, 1))(
        hidden, head
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, right in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-6 * float(jnp.abs(right).max()) + 1e-7)
    choices = vocabulary_loss(hidden, head, soft, ALL, counted, objective=objective)[1]
    assert choices.tolist() == jnp.argmax(hidden @ head.T, axis=-1).tolist()


def test_rows_choose_their_teacher(parts):
    """Any row of the table, and a uniform one below 0."""
    hidden, head, soft, counted = parts
    order = np.asarray([3, 3, -1, *range(ROWS - 3)], np.int32)
    table = jnp.concatenate([soft, jnp.full((1, VOCAB), 1 / VOCAB)])[order]
    found = vocabulary_loss(hidden, head, soft, jnp.asarray(order), counted)[0]
    np.testing.assert_allclose(found, plain("entropy", hidden, head, table, counted), rtol=1e-6)


def test_acceptance_by_hand():
    soft = jnp.asarray([[0.5, 0.3, 0.2]])
    logits = jnp.log(jnp.asarray([[0.2, 0.2, 0.6]]))
    assert float(row_losses("acceptance", logits, soft)[0]) == pytest.approx(-np.log(0.2 + 0.2 + 0.2), rel=1e-6)


def test_rows_weigh_as_told(parts):
    hidden, head, soft, counted = parts
    weights = jnp.linspace(0.1, 2.0, ROWS)
    value, each = (vocabulary_loss(hidden, head, soft, ALL, counted, weights)[i] for i in (0, 2))
    np.testing.assert_allclose(value, jnp.sum(jnp.where(counted, weights * each, 0)), rtol=1e-6)
    np.testing.assert_allclose(each, row_losses("entropy", jnp.einsum("nd,wd->nw", hidden, head), soft), rtol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_finite_differences(parts, objective):
    hidden, head, soft, counted = parts
    f = lambda h: vocabulary_loss(h, head, soft, ALL, counted, objective=objective, learn_head=False)[0]
    gradient, step = jax.grad(f)(hidden), 1e-2
    for place in ((0, 1), (4, 3), (12, 5)):
        moved = [float(f(hidden.at[place].add(sign * step))) for sign in (1, -1)]
        assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(float(gradient[place]), abs=5e-3)


def test_no_logits_of_all_rows_in_the_program():
    """With a head that is not learned, neither the logits of all rows nor a gradient of the head's shape exist."""
    rows, vocab, width = 4096, 16384, 64
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)

    def step(hidden, head, soft, order, counted):
        return jax.grad(lambda h: vocabulary_loss(h, head, soft, order, counted, learn_head=False)[0])(hidden)

    given = (shape(rows, width), shape(vocab, width), shape(rows, vocab))
    given = (*given, shape(rows, dtype=jnp.int32), shape(rows, dtype=jnp.bool_))
    text = jax.jit(step).lower(*given).as_text()
    assert f"tensor<{rows}x{vocab}xf32>" not in text
    assert f"tensor<{vocab}x{width}xf32>" not in text
