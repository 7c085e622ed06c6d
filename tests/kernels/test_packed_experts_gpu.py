"""The experts kernels for packed weights without a GPU: interpreted, with a search for races, and lowered at the shapes of real models."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eaglejax.kernels import select
from eaglejax.kernels.experts import experts
from eaglejax.kernels.experts_gpu_shape import SHARED, TILE, packed_ring, packed_serves, padded_rows, summed
from eaglejax.models.packed import PackedWeight, Packing

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
BF16 = ml_dtypes.bfloat16
PACKINGS = {"int4": Packing("int4", 1, 32, "bfloat16"), "fp8": Packing("fp8", 128, 128)}
WIDTHS, COUNT = {"int4": (512, 256), "fp8": (512, 512)}, 5  # d, f


def packed(kind, *shape, seed=0):
    rng = np.random.default_rng(seed)
    weight = PackedWeight(shape, PACKINGS[kind], dtype=jnp.bfloat16)
    if kind == "int4":
        values = rng.integers(0, 256, weight.values.shape, dtype=np.uint8)
    else:
        values = (4 * rng.standard_normal(weight.values.shape)).astype(ml_dtypes.float8_e4m3fn)
    scale = (0.2 + rng.random(weight.scale.shape)) / 4 / shape[-1] ** 0.5
    weight.values[...] = jnp.asarray(values)
    weight.scale[...] = jnp.asarray(scale.astype(PACKINGS[kind].scale))
    return weight


def problem(kind, ids, seed=0):
    """Rows, their experts, weights; gate and up, down. The weights do not depend on the seed."""
    rng, (d, f) = np.random.default_rng(seed), WIDTHS[kind]
    ids = np.asarray(ids, np.int32)
    x = rng.standard_normal((len(ids), d)).astype(BF16)
    return x, ids, rng.random(ids.shape).astype(np.float32), packed(kind, COUNT, 2, f, d), packed(kind, COUNT, d, f)


def loop(x, ids, weights, gate_up, down):
    """One row and one expert at a time, in float64, over widened weights."""
    x, gate_up, down = (np.asarray(array).astype(np.float64) for array in (x, gate_up[...], down[...]))
    out = np.zeros(x.shape)
    for row, chosen in enumerate(ids):
        for expert, weight in zip(chosen, weights[row], strict=True):
            if expert < len(gate_up):
                gate, up = gate_up[expert] @ x[row]
                out[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def params():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def no_races():
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return not interpret_pallas_call.get_races().races_found


def run(arrays):
    """Interpreted; races fail the test."""
    from eaglejax.kernels.packed_experts_gpu import packed_experts_gpu

    x, ids, weights, gate_up, down = arrays
    rows = jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights)
    out = summed(packed_experts_gpu(*rows, gate_up, down, interpret=params()), rows[0])
    assert out.dtype == jnp.bfloat16 and no_races()
    return np.asarray(out).astype(np.float32)


ROUTES = {
    "one row": [[1, 4]],
    "three rows, some nobody": [[0, 5], [5, 6], [2, 3]],
    "eight rows": [[e % 3, 4] for e in range(8)],
    "nobody": [[5, 7]],
}


@pytest.mark.parametrize("routes", list(ROUTES))
@pytest.mark.parametrize("kind", list(PACKINGS))
def test_against_a_plain_loop(kind, routes):
    arrays = problem(kind, ROUTES[routes])
    want = loop(*arrays)
    np.testing.assert_allclose(run(arrays), want, atol=1e-2 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("kind", list(PACKINGS))
def test_widened_to_the_same_bits(kind):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from eaglejax.kernels.experts_gpu import PARAMS
    from eaglejax.kernels.packed_experts_gpu import packed_form

    weight, step, row = packed(kind, 2, 128, 512), 1, TILE
    form = packed_form(weight)
    ring = form.ring(8, 512, 512)

    def widen(x, values, scale, out, full, **buffers):
        zero = jax.lax.axis_index("block")
        row_ = pl.multiple_of(zero + row, TILE)
        form.bring((values, scale), [(1 + zero,)], row_, zero + step, lambda over: x.at[:, over], buffers, 0, full)
        plgpu.barrier_wait(full)
        form.prepare(buffers, 0)
        for part in (0, 1):
            form.widen(buffers, 0, part)
        plgpu.commit_smem()
        for part in (0, 1):
            plgpu.copy_smem_to_gmem(buffers["wide"].at[part], out.at[part])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        widen,
        out_type=jax.ShapeDtypeStruct((2, TILE, 128), jnp.bfloat16),
        scratch_types={**form.scratch(ring, TILE, 8), "full": plgpu.Barrier(num_arrivals=form.copies(1))},
        grid=(1,),
        grid_names=("block",),
        compiler_params=PARAMS,
        interpret=params(),
    )
    got = np.asarray(kernel(jnp.zeros((8, 512), jnp.bfloat16), weight.values[...], weight.scale[...]))
    want = np.asarray(weight[...])[1, row : row + TILE, 256 * step : 256 * (step + 1)]
    want = (want[:, 0::2], want[:, 1::2]) if kind == "int4" else (want[:, :128], want[:, 128:])
    assert no_races()
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kind", list(PACKINGS))
def test_neighbours_never_change_a_row(kind):
    """Bit for bit: whatever the other rows hold, wherever they go, and however many they are."""
    arrays = problem(kind, [[1, 4]])
    others = problem(kind, [[0, 2], [1, 4], [5, 6], [1, 3]], seed=7)
    for array, one in zip(others[:3], arrays[:3], strict=True):
        array[1] = one[0]
    others[0][0], others[0][3] = np.inf, np.nan
    got = run(others)
    np.testing.assert_array_equal(got[1], run(arrays)[0])
    np.testing.assert_array_equal(got[2], 0)
    assert not np.isfinite(got[[0, 3]]).any()


def abstract(kind, rows, count, d=7168, f=2048, k=8):
    from flax import nnx

    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    weight = lambda *dims: nnx.eval_shape(lambda: PackedWeight(dims, PACKINGS[kind], dtype=jnp.bfloat16))
    rows_of = shape(jnp.bfloat16, rows, d), shape(jnp.int32, rows, k), shape(jnp.float32, rows, k)
    return *rows_of, weight(count, 2, f, d), weight(count, d, f)


def lowered(arrays):
    """Traced anew, by the choice that is in force; weights are arguments."""
    from flax import nnx

    graph, state = nnx.split(list(arrays[3:]))
    traced = jax.jit(lambda rows, state: experts(*rows, *nnx.merge(graph, state))).trace(arrays[:3], state)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("kind, count", [("int4", 48), ("fp8", 32)], ids=["kimi-k2.5-eighth", "deepseek-v3-eighth"])
def test_lowers_for_a_gpu(kind, count, rows):
    """The whole of Mosaic's lowering, layouts and shared memory included, runs without a card."""
    with select.compiling_for("gpu"), select.kernels("pallas"):
        assert lowered(abstract(kind, rows, count)).count("custom_call @mosaic_gpu") == 2


def test_only_where_they_were_asked_for():
    with select.compiling_for("gpu"):
        assert "packed" not in select.describe()[1]
        with select.kernels("auto"):
            assert "mosaic_gpu" not in lowered(abstract("int4", 1, 4, 512, 512))
        with select.kernels("pallas"):
            assert "packed INT4 and FP8 too (not measured)" in select.describe()[1]
            assert "mosaic_gpu" not in lowered(abstract("int4", 65, 4, 512, 512))


def test_which_weights_are_served():
    assert packed_serves("int4", [(1, 32), (1, 32)], "bfloat16", 7168, 2048) is None
    assert packed_serves("fp8", [(128, 128), (64, 128)], "float32", 7168, 2048) is None
    assert "not mxfp4" in (packed_serves("mxfp4", [(1, 32)], "uint8", 7168, 2048) or "")
    assert "32 weights" in (packed_serves("int4", [(1, 32), (1, 128)], "bfloat16", 7168, 2048) or "")
    assert "whole tiles" in (packed_serves("fp8", [(1, 128)], "float32", 7168, 2048) or "")
    assert "whole steps of 512" in (packed_serves("fp8", [(128, 128)], "float32", 7168, 256) or "")


@pytest.mark.parametrize("rows", [1, 9, 17, 33])
@pytest.mark.parametrize("d, f", [(512, 512), (7168, 2048), (4096, 14336)])
def test_rings_fit(rows, d, f):
    columns, size = padded_rows(rows), 260
    for shape, tile, item in (((d,), 2 * TILE, 2), ((d, f), TILE, 4)):
        ring = packed_ring(columns, *shape, size=size)
        least = ring.stages * (tile * size + columns * ring.step * 2) + tile * (512 + 16) + TILE * columns * item
        assert least <= SHARED and ring.stages >= 2
        assert ring.parts == packed_ring(8, *shape, size=size).parts <= f // ring.step
