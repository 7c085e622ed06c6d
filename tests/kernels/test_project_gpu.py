"""The projections kernel for Hopper GPUs without one: interpreted, with a search for races, and lowered at the shapes of real models."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from eaglejax.kernels import select
from eaglejax.kernels.experts_gpu_shape import BLOCKS, SHARED, padded_rows
from eaglejax.kernels.project import TILE, cut_of, projections, serves, serves_shapes
from eaglejax.models.layers import Linear, project
from eaglejax.models.split import Over

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
BF16 = ml_dtypes.bfloat16


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(BF16)


def run(x, *weights, accumulate=None):
    """Interpreted; races fail the test."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu

    from eaglejax.kernels.project_gpu import project_gpu

    plgpu: Any = mosaic_gpu  # typed otherwise in jax 0.10
    params = plgpu.InterpretGPUParams(detect_races=True)
    outs = project_gpu(jnp.asarray(x), *map(jnp.asarray, weights), accumulate=accumulate, interpret=params)
    assert all(out.dtype == (accumulate or jnp.bfloat16) for out in outs)
    outs = [np.asarray(out) for out in outs]
    assert not interpret_pallas_call.get_races().races_found
    return outs


def close(got, x, weight):
    """Against float64: rounded once, to nearest, but for the float32 sum's error."""
    want = x.astype(np.float64) @ weight.astype(np.float64).reshape(-1, x.shape[-1]).T
    size = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).reshape(-1, x.shape[-1]).T
    half = 2.0**-8 if got.dtype == BF16 else 0.0
    got = got.astype(np.float64).reshape(want.shape)
    assert (np.abs(got - want) <= 1.01 * half * np.abs(want) + 1e-6 * size).all()


# rows, d, rows of the weights, parts of a sum
CASES = [
    (1, 128, (64,), 1),
    (3, 320, (192, 64), 2),
    (8, 576, (64, 64, 192), 1),
    (9, 512, (128,), 2),
    (33, 192, (64, 192), 1),
    (16, 1024, (192,), 4),
    (8, 256, (133 * TILE,), 1),
]


@pytest.mark.parametrize("accumulate", [None, "float32"])
@pytest.mark.parametrize("rows, d, outs, parts", CASES)
def test_against_float64(rows, d, outs, parts, accumulate):
    assert cut_of(rows, d, outs).parts == parts
    x, weights = draw(0, rows, d), [draw(1 + index, out, d) for index, out in enumerate(outs)]
    for got, weight in zip(run(x, *weights, accumulate=accumulate), weights, strict=True):
        assert got.shape == (rows, len(weight))
        close(got, x, weight)


def test_several_tiles_for_a_block():
    x, weights = draw(0, 2, 64), [draw(1, 100 * TILE, 64), draw(2, 45 * TILE, 64)]
    for got, weight in zip(run(x, *weights), weights, strict=True):
        close(got, x, weight)


def test_leading_axes_stay():
    x, q, kv = draw(0, 2, 3, 128), draw(1, 128, 128), draw(2, 2, 64, 128)
    first, second = run(x, q, kv)
    assert first.shape == (2, 3, 128) and second.shape == (2, 3, 2, 64)
    close(first, x.reshape(6, 128), q)
    close(second, x.reshape(6, 128), kv)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("d", [192, 1024])
def test_neighbours_never_change_a_row(d):
    """Bit for bit: whatever the other rows hold and however many they are, with one part of a sum and with four."""
    x, weights = draw(0, 8, d), [draw(1, 128, d), draw(2, 64, d)]
    first = run(x, *weights)
    for rows, place in ((1, 0), (8, 2), (9, 8), (33, 20)):
        others = draw(rows, rows, d)
        others[0], others[-1] = np.nan, np.inf
        others[place] = x[5]
        for before, now in zip(first, run(others, *weights), strict=True):
            np.testing.assert_array_equal(before[5], now[place])
            finite = np.isfinite(now.astype(np.float32)).all(axis=1)
            assert finite.sum() == (1 if rows == 1 else rows - 1 - (place != rows - 1))


# d, rows of the weights, dtype of the result
SHAPES = {
    "qwen3-30b-a3b q, kv": (2048, (4096, 1024), None),
    "qwen3-30b-a3b out": (4096, (2048,), None),
    "qwen3-30b-a3b head": (2048, (151936,), "float32"),
    "mixtral-8x7b q, kv": (4096, (4096, 2048), None),
    "mixtral-8x7b out": (4096, (4096,), None),
    "deepseek-v3 q_a, kv_a": (7168, (1536, 576), None),
    "deepseek-v3 q_b": (1536, (24576,), None),
    "deepseek-v3 out": (16384, (7168,), None),
    "smollm2-135m q, kv": (576, (576, 384), None),
    "smollm2-135m gate, up": (576, (3072,), None),
    "smollm2-135m head": (576, (49152,), "float32"),
}
ROWS = (1, 8, 9, 32, 64)


@pytest.mark.parametrize("name", list(SHAPES))
def test_lowers_for_a_gpu(name):
    """The whole of Mosaic's lowering, layouts and shared memory included, runs without a card. One kernel a call."""
    from eaglejax.kernels.project_gpu import project_gpu

    d, outs, accumulate = SHAPES[name]
    for rows in ROWS:
        assert serves_shapes(rows, d, outs, [jnp.bfloat16]) is None
        arrays = [jax.ShapeDtypeStruct((count, d), jnp.bfloat16) for count in (rows, *outs)]
        lowered = project_gpu.trace(*arrays, accumulate=accumulate).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("name", list(SHAPES))
def test_cuts_fit(name):
    d, outs, _ = SHAPES[name]
    cuts = [cut_of(rows, d, outs) for rows in ROWS]
    assert len({(cut.tiles, cut.parts, cut.parts > 1 and cut.step) for cut in cuts}) == 1  # the order of a sum
    for rows, cut in zip(ROWS, cuts, strict=True):
        columns, shared = padded_rows(rows), (cut.parts + 1 if cut.parts > 1 else 1)
        assert cut.stages * (TILE + columns) * cut.step * 2 + columns * TILE * 4 * shared <= SHARED
        assert cut.steps * cut.step == d and cut.blocks * cut.parts <= BLOCKS and cut.stages >= 3


def linear(d, out, seed=1, dtype=jnp.bfloat16, **options):
    made = Linear(d, out, axes=("h", "d") if isinstance(out, int) else (None, "k", "d"), dtype=dtype, **options)
    made.weight = nnx.Param(jnp.asarray(draw(seed, *made.weight.shape), dtype))
    return made


def test_what_is_served():
    x = jnp.zeros((1, 4, 128), jnp.bfloat16)
    both = linear(128, 256), linear(128, (2, 64))
    reason = lambda *given: serves(*given) or ""
    assert serves(x, both) is None
    assert "64 rows, not 65" in reason(jnp.zeros((1, 65, 128), jnp.bfloat16), both)
    assert "not float32" in reason(x, [linear(128, 64, dtype=jnp.float32)])
    assert "96 is not made of whole tiles" in reason(x, [linear(128, 96)])
    assert "no bias" in reason(x, [linear(128, 64, use_bias=True)])
    assert "over devices" in reason(x, [linear(128, 64, summed=Over("model", (), 2))])
    assert "1 to 4 weights" in reason(x, 5 * [both[0]])


def test_the_choice_by_name(monkeypatch):
    """Only where it is asked for, and never on a CPU."""
    monkeypatch.delenv(select.VARIABLE, raising=False)
    both = linear(128, 256), linear(128, (2, 64), seed=2)
    text = lambda: jax.jit(lambda x: projections(x, *both)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    x = jnp.asarray(draw(0, 1, 4, 128))
    for got, one in zip(projections(x, *both), both, strict=True):
        np.testing.assert_array_equal(got, project(x, one.weight[...]))
    with select.compiling_for("gpu"):
        assert "mosaic_gpu" not in text()
        with select.kernels("pallas"):
            assert text().count("custom_call @mosaic_gpu") == 1
