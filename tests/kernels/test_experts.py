"""The experts kernel against a plain loop in float64, both of its ways, at odd sizes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eaglejax.kernels.experts import experts, gather_pays

WAYS = pytest.mark.parametrize("gather", [True, False], ids=["gathered", "looped"])


def loop(x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation="silu"):
    """One row and one expert at a time, in float64."""
    out = np.zeros(x.shape, np.float64)
    for row, chosen in enumerate(ids):
        for expert, weight in zip(chosen, weights[row], strict=True):
            if expert >= len(gate_up):
                continue
            both = gate_up[expert].astype(np.float64) @ x[row].astype(np.float64)
            if gate_up_bias is not None:
                both = both + gate_up_bias[expert]
            gate, up = both
            if activation == "silu":
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            y = down[expert].astype(np.float64) @ inner
            out[row] += weight * (y if down_bias is None else y + down_bias[expert])
    return out


def problem(rows, d, f, count, topk, seed=0, taken=None):
    """Random weights and routes; `taken`: the only experts that are ever chosen."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    pool = np.arange(count) if taken is None else np.array(taken)
    ids = np.stack([np.sort(rng.choice(pool, topk, replace=False)) for _ in range(rows)]).astype(np.int32)
    gate_up, down = draw(count, 2, f, d) / d**0.5, draw(count, d, f) / f**0.5
    return draw(rows, d), ids, rng.random((rows, topk)).astype(np.float32), gate_up, down


@WAYS
@pytest.mark.parametrize(
    "rows, d, f, count, topk, taken",
    [
        (1, 96, 40, 8, 2, None),
        (2, 100, 96, 8, 3, None),
        (3, 33, 7, 12, 1, None),
        (7, 96, 96, 12, 4, (1, 4, 5, 11)),  # groups of size zero
        (9, 40, 100, 8, 1, (6,)),  # one expert takes everything
        (64, 48, 20, 128, 8, None),
        (100, 20, 24, 8, 8, None),  # every row goes everywhere
    ],
)
def test_against_a_plain_loop(gather, rows, d, f, count, topk, taken):
    x, ids, weights, gate_up, down = problem(rows, d, f, count, topk, taken=taken)
    got = experts(*map(jnp.asarray, (x, ids, weights, gate_up, down)), gather=gather)
    np.testing.assert_allclose(got, loop(x, ids, weights, gate_up, down), atol=1e-4, rtol=0)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 9, 64, 100])
@pytest.mark.parametrize("d, f", [(96, 2560), (100, 96), (768, 96), (1408, 96)])
@pytest.mark.parametrize("count", [8, 12, 128])
def test_every_size(gather, rows, d, f, count):
    if gather and rows * 4 * d * f > 2**26:
        pytest.skip("the gathered weights alone would be gigabytes; no caller gathers that many")
    x, ids, weights, gate_up, down = problem(rows, d, f, count, 4)
    got = experts(*map(jnp.asarray, (x, ids, weights, gate_up, down)), gather=gather)
    np.testing.assert_allclose(got, loop(x, ids, weights, gate_up, down), atol=1e-4, rtol=0)


@WAYS
def test_biases_and_clamped_activation(gather):
    x, ids, weights, gate_up, down = problem(5, 24, 12, 6, 2)
    rng = np.random.default_rng(1)
    gate_up_bias = (6 * rng.standard_normal((6, 2, 12))).astype(np.float32)  # reaches both clamps
    down_bias = rng.standard_normal((6, 24)).astype(np.float32)
    arrays = (x, ids, weights, 4 * gate_up, down, gate_up_bias, down_bias)
    got = experts(*map(jnp.asarray, arrays), activation="gpt_oss", gather=gather)
    np.testing.assert_allclose(got, loop(*arrays, activation="gpt_oss"), atol=2e-4, rtol=0)


@WAYS
@pytest.mark.parametrize("rows, d, f, count", [(9, 96, 40, 12), (1, 100, 96, 8), (7, 1408, 96, 8), (3, 768, 2560, 8)])
def test_bfloat16(gather, rows, d, f, count):
    x, ids, weights, gate_up, down = problem(rows, d, f, count, 3)
    x, gate_up, down = (array.astype(ml_dtypes.bfloat16) for array in (x, gate_up, down))
    got = experts(*map(jnp.asarray, (x, ids, weights, gate_up, down)), gather=gather)
    want = loop(x, ids, weights, gate_up, down)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2 * np.abs(want).max(), rtol=0)


@WAYS
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_spoiled_row_spoils_no_other(gather, bad):
    arrays = problem(6, 20, 12, 8, 2)
    x, *rest = arrays
    clean = experts(*map(jnp.asarray, arrays), gather=gather)
    spoiled = x.copy()
    spoiled[3] = bad
    got = np.asarray(experts(jnp.asarray(spoiled), *map(jnp.asarray, rest), gather=gather))
    others = [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(got[others], np.asarray(clean)[others])
    assert not np.isfinite(got[3]).any()


@WAYS
def test_an_id_beyond_the_experts_is_nobody(gather):
    x, ids, weights, gate_up, down = problem(4, 20, 12, 8, 2)
    ids[1], ids[2, 1] = 8, 9
    x[1] = np.nan
    got = experts(*map(jnp.asarray, (x, ids, weights, gate_up, down)), gather=gather)
    x[1] = 0
    np.testing.assert_allclose(got, loop(x, ids, weights, gate_up, down), atol=1e-5, rtol=0)
    np.testing.assert_array_equal(got[1], 0)


@WAYS
def test_neighbours_never_change_a_row(gather):
    """Bit for bit, in the same program: whatever the other rows hold and wherever they go."""
    x, ids, weights, gate_up, down = problem(16, 48, 20, 12, 3)
    run = jax.jit(lambda *arrays: experts(*arrays, gather=gather))
    first = np.asarray(run(*map(jnp.asarray, (x, ids, weights, gate_up, down))))
    other, other_ids, other_weights, *_ = problem(16, 48, 20, 12, 3, seed=7)
    other[5], other_ids[5], other_weights[5] = x[5], ids[5], weights[5]
    second = np.asarray(run(*map(jnp.asarray, (other, other_ids, other_weights, gate_up, down))))
    np.testing.assert_array_equal(first[5], second[5])
    assert (first[4] != second[4]).any()


def test_both_ways_agree_closely():
    arrays = [jnp.asarray(a) for a in problem(8, 64, 32, 16, 4)]
    np.testing.assert_allclose(experts(*arrays, gather=True), experts(*arrays, gather=False), atol=2e-6, rtol=0)


def test_when_weights_are_gathered():
    assert not gather_pays(1, 128)  # never on a CPU
    assert gather_pays(64, 128, "gpu") and not gather_pays(65, 128, "gpu")
    assert not gather_pays(1, 128, "cpu")
