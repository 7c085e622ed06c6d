"""The router's kernels for Hopper GPUs without one: interpreted beside the router in jnp, with a search for races, and lowered."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from eaglejax.kernels import select
from eaglejax.kernels.experts import experts
from eaglejax.kernels.experts_gpu_shape import SHARED, TILE, padded_rows, route_columns, route_serves, summed
from eaglejax.models.config import MoEConfig
from eaglejax.models.layers import project
from eaglejax.models.moe import MoE, route, watching_routers

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
D = 128


def problem(rows, config, seed=0, d=D):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    bias = draw(config.experts) if config.router_bias else None
    correction = 0.1 * draw(config.experts) if config.correction_bias else None
    return draw(rows, d).astype(ml_dtypes.bfloat16), draw(config.experts, d) / np.float32(d**0.5), bias, correction


def run(x, weight, bias, correction, config, with_ids):
    """Interpreted; races fail the test."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from eaglejax.kernels.route_gpu import route_gpu

    params = plgpu.InterpretGPUParams(detect_races=True)
    given = [None if array is None else jnp.asarray(array) for array in (x, weight, bias, correction)]
    tables = route_gpu(*given, config=config, with_ids=with_ids, interpret=params)
    assert not interpret_pallas_call.get_races().races_found
    return tables


def reference(x, weight, bias, correction, config):
    logits = project(jnp.asarray(x).astype(jnp.float32), jnp.asarray(weight))
    ids, weights = route(
        logits if bias is None else logits + bias, config, None if correction is None else jnp.asarray(correction)
    )
    return np.asarray(ids), np.asarray(weights)


def check(x, weight, bias, correction, config, with_ids=False, rows=slice(None)):
    """Returns the ids of all rows. `rows`: those that are compared."""
    tables = run(x, weight, bias, correction, config, with_ids)
    ids, weights = reference(x, weight, bias, correction, config)
    table, words = np.asarray(tables.table), np.asarray(tables.words)
    assert (table[:, len(x) :] == -np.inf).all() and (table[config.experts :] == -np.inf).all()
    table = table[:, : len(x)].T
    got = [np.flatnonzero(line != -np.inf) for line in table]
    for row in np.arange(len(x))[rows]:
        np.testing.assert_array_equal(got[row], ids[row])
        np.testing.assert_allclose(table[row, ids[row]], weights[row], atol=1e-6, rtol=1e-6)
    bits = (words[:, None] >> np.arange(32)) & 1
    np.testing.assert_array_equal(np.flatnonzero(bits), np.unique(np.concatenate(got)))
    if with_ids:
        assert tables.ids is not None and tables.weights is not None
        np.testing.assert_array_equal(tables.ids[rows], ids[rows])
        np.testing.assert_allclose(tables.weights[rows], weights[rows], atol=1e-6, rtol=1e-6)
    return got


CONFIGS = {
    "softmax": MoEConfig(128, 8, 64),
    "softmax, as it is": MoEConfig(32, 4, 64, normalise=False, scaling=0.5),
    "sigmoid": MoEConfig(16, 3, 64, "sigmoid", scaling=2.5),
    "softmax_topk": MoEConfig(32, 4, 64, "softmax_topk", router_bias=True, expert_bias=True),
    "correction": MoEConfig(384, 8, 64, "sigmoid", correction_bias=True),
    "groups": MoEConfig(256, 8, 64, "sigmoid", groups=8, topk_groups=4, correction_bias=True, scaling=2.5),
    "groups of softmax": MoEConfig(48, 3, 64, groups=4, topk_groups=2, router_bias=True, correction_bias=True),
}


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_against_the_router_in_jnp(name, rows):
    config = CONFIGS[name]
    check(*problem(rows, config, rows), config, with_ids=config.expert_bias or rows == 3)


def test_more_rows():
    check(*problem(11, CONFIGS["softmax"]), CONFIGS["softmax"], with_ids=True)


def test_products_are_float32():
    """Several ranges of several tiles; a logit is off by rounding of float32 and no more."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from eaglejax.kernels.route_gpu import _product

    config, d = MoEConfig(72, 4, 64), 22 * TILE
    x, weight, *none = problem(5, config, d=d)
    assert route_columns(d) == 2 * TILE
    check(x, weight, *none, config)
    parts = _product(5, x.shape, weight.shape, route_columns(d), plgpu.InterpretGPUParams())(
        jnp.asarray(x), jnp.asarray(weight)
    )
    got = np.asarray(parts).astype(np.float64).sum(0)[:72, :5].T
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.astype(np.float64).T, atol=2e-6, rtol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_topk"])
def test_equal_scores_go_to_the_lower_id(score):
    config = MoEConfig(80, 5, 64, score)
    x, weight, *none = problem(3, config)
    weight[:] = weight[[7]]
    weight[70] *= 2  # for rows with a positive logit the best, for others the last
    got = check(x, weight, *none, config, with_ids=True)
    assert {tuple(line) for line in map(np.ndarray.tolist, got)} <= {(0, 1, 2, 3, 4), (0, 1, 2, 3, 70)}
    x[1] = 0
    assert check(x, weight, *none, config)[1].tolist() == [0, 1, 2, 3, 4]


def test_equal_groups_go_to_the_lower_one():
    config = MoEConfig(64, 4, 64, "sigmoid", groups=4, topk_groups=2)
    x, weight, *none = problem(3, config)
    weight[16:32] = weight[:16]
    weight[48:] = weight[32:48]
    check(x, weight, *none, config)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", ["softmax", "softmax_topk", "groups"])
def test_neighbours_never_change_a_row(name):
    config = CONFIGS[name]
    x, weight, *vectors = problem(8, config)
    first = run(x, weight, *vectors, config, False)
    x[3], x[6], x[0] = np.inf, np.nan, -np.inf
    check(x, weight, *vectors, config, rows=slice(1, 3))
    second = run(x, weight, *vectors, config, False)
    rows = [1, 2, 4, 5, 7]
    np.testing.assert_array_equal(first.table[:, rows], second.table[:, rows])


def test_experts_that_cannot_be_chosen():
    """Logits of -inf, from a router's bias, come last, and in order."""
    config = MoEConfig(32, 4, 64, "softmax_topk", router_bias=True)
    x, weight, bias, none = problem(2, config)
    bias[:] = -np.inf
    bias[[9, 20]] = 1.0
    assert check(x, weight, bias, none, config, with_ids=True)[0].tolist() != []


# d and mixture
SHAPES = {
    "qwen3-30b-a3b": (2048, MoEConfig(128, 8, 768)),
    "gpt-oss-20b": (2880, MoEConfig(32, 4, 2880, "softmax_topk", router_bias=True, expert_bias=True)),
    "deepseek-v3": (
        7168,
        MoEConfig(256, 8, 2048, "sigmoid", scaling=2.5, groups=8, topk_groups=4, correction_bias=True),
    ),
    "kimi-k2": (7168, MoEConfig(384, 8, 2048, "sigmoid", scaling=2.5, correction_bias=True)),
}


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("name", list(SHAPES))
def test_lowers_for_a_gpu(name, rows):
    from eaglejax.kernels.route_gpu import route_gpu

    d, config = SHAPES[name]
    e = config.experts
    assert route_serves(rows, e, d, jnp.bfloat16) is None
    assert TILE * 4 * route_columns(d) + padded_rows(rows) * 2 * route_columns(d) <= SHARED
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    vector = lambda has: shape(jnp.float32, e) if has else None
    given = shape(jnp.bfloat16, rows, d), shape(jnp.float32, e, d), vector(config.router_bias)
    traced = route_gpu.trace(*given, vector(config.correction_bias), config=config, with_ids=config.expert_bias)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 2


def test_which_shapes_are_served():
    assert route_serves(16, 512, 2048, jnp.bfloat16) is None
    assert "16 rows, not 17" in (route_serves(17, 8, 4096, jnp.bfloat16) or "")
    assert "not float32" in (route_serves(1, 8, 4096, jnp.float32) or "")
    assert "not to 60" in (route_serves(1, 60, 4096, jnp.bfloat16) or "")
    assert "whole tiles" in (route_serves(1, 16, 576 + 8, jnp.bfloat16) or "")
    assert "fits" in (route_serves(1, 16, 64 * 17, jnp.bfloat16) or "")


def test_the_experts_read_the_tables():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from eaglejax.kernels.experts_gpu import experts_of_tables

    config = MoEConfig(24, 3, 64, "softmax_topk", router_bias=True, expert_bias=True, expert_activation="gpt_oss")
    x, weight, bias, _ = problem(3, config)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)
    arrays = draw(0, 24, 2, 64, D), draw(1, 24, D, 64), draw(2, 24, 2, 64), draw(3, 24, D)
    tables = run(x, weight, bias, None, config, True)
    params = plgpu.InterpretGPUParams(detect_races=True)
    x = jnp.asarray(x)
    got = summed(experts_of_tables(x, tables, *arrays, topk=3, activation="gpt_oss", interpret=params), x)
    ids, weights = map(jnp.asarray, reference(x, weight, bias, None, config))
    want = np.asarray(experts(x, ids, weights, *arrays, activation="gpt_oss")).astype(np.float32)
    np.testing.assert_allclose(np.asarray(got).astype(np.float32), want, atol=1.5e-2 * np.abs(want).max(), rtol=0)


def test_a_mixture_takes_the_kernels(monkeypatch):
    """Of router and experts where they serve both; of experts alone where a router is watched or rows are many."""
    monkeypatch.delenv(select.VARIABLE, raising=False)
    config = MoEConfig(16, 2, 64, router_bias=True)

    def calls(rows, dtype=jnp.bfloat16):
        graph, state = nnx.split(nnx.eval_shape(lambda: MoE(config, D, dtype=dtype)))
        # traced anew: what is chosen depends on more than the arguments
        layer = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        traced = layer.trace(state, jax.ShapeDtypeStruct((1, rows, D), dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu")

    assert calls(4) == 0
    with select.compiling_for("gpu"):
        assert calls(4) == 4 and calls(17) == 2 and calls(4, jnp.float32) == 0
        with watching_routers() as seen:
            assert calls(4) == 2 and len(seen.experts) == 1
        monkeypatch.setenv(select.VARIABLE, "xla")
        assert calls(4) == 0
