"""The experts kernels for Hopper GPUs without one: interpreted, with a search for races, and lowered at the shapes of real models."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.kernels import select
from eaglejax.kernels.experts import experts
from eaglejax.kernels.experts_gpu_shape import SHARED, TILE, down_ring, gateup_ring, padded_rows, serves, summed

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
BF16 = ml_dtypes.bfloat16
D, F, COUNT = 128, 128, 6


def problem(ids, seed=0, biases=False, count=COUNT, d=D, f=F):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    ids = np.asarray(ids, np.int32)
    arrays = [
        draw(len(ids), d).astype(BF16),
        ids,
        rng.random(ids.shape).astype(np.float32),
        (3 * draw(count, 2, f, d) / d**0.5).astype(BF16),
        (draw(count, d, f) / f**0.5).astype(BF16),
    ]
    if biases:
        arrays += [(6 * draw(count, 2, f)).astype(BF16), draw(count, d).astype(BF16)]
    return arrays


def loop(x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation="silu"):
    """One row and one expert at a time, in float64."""
    x, weights, gate_up, down = (array.astype(np.float64) for array in (x, weights, gate_up, down))
    out = np.zeros(x.shape)
    for row, chosen in enumerate(ids):
        for expert, weight in zip(chosen, weights[row], strict=True):
            if expert >= len(gate_up):
                continue
            gate, up = gate_up[expert] @ x[row] + (0 if gate_up_bias is None else gate_up_bias[expert].astype(float))
            if activation == "silu":
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            y = down[expert] @ inner
            out[row] += weight * (y if down_bias is None else y + down_bias[expert].astype(float))
    return out


def run(arrays, activation="silu"):
    """Interpreted; races fail the test."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from eaglejax.kernels.experts_gpu import experts_gpu

    params = plgpu.InterpretGPUParams(detect_races=True)
    arrays = [jnp.asarray(array) for array in arrays]
    out = np.asarray(summed(experts_gpu(*arrays, activation=activation, interpret=params), arrays[0])).astype(
        np.float32
    )
    assert not interpret_pallas_call.get_races().races_found
    return out


def close(got, want):
    np.testing.assert_allclose(got, want, atol=1.5e-2 * np.abs(want).max(), rtol=0)


ROUTES = {
    "one row": [[1, 4]],
    "three rows, one expert": [[2], [2], [2]],
    "eight rows, all experts": [[e % 5, e % 5 + 1] for e in range(8)],
    "nine rows": [[e % 3, 5] for e in range(9)],
    "nobody": [[6, 7], [6, 6]],
    "some nobody": [[0, 6], [6, 7], [3, 5]],
}


@pytest.mark.parametrize("routes", list(ROUTES))
def test_against_a_plain_loop(routes):
    arrays = problem(ROUTES[routes])
    close(run(arrays), loop(*arrays))


def test_biases_and_clamped_activation():
    arrays = problem([[0, 5], [1, 5], [6, 6]], biases=True)
    close(run(arrays, "gpt_oss"), loop(*arrays, activation="gpt_oss"))


def test_many_experts_and_several_tiles():
    """Bits beyond the first word, several tasks for a block, parts of a sum, steps that are not powers of two."""
    arrays = problem([[3, 31, 32], [31, 40, 65], [0, 64, 69]], count=70, d=192, f=192)
    close(run(arrays), loop(*arrays))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_neighbours_never_change_a_row():
    """Bit for bit: whatever the other rows hold, wherever they go, and however many they are."""
    ids = [[e % 3, 4] for e in range(8)]
    arrays = problem(ids)
    first = run(arrays)
    others = problem([[0, 5], [1, 2], [3, 5], [2, 4], [6, 6], [0, 1], [1, 5], [3, 4]], seed=7)
    others[0][5], others[1][5], others[2][5] = (array[5] for array in arrays[:3])
    others[3:] = arrays[3:]
    others[0][3], others[0][6] = np.inf, np.nan
    second = run(others)
    np.testing.assert_array_equal(first[5], second[5])
    assert (first[4] != second[4]).any() and not np.isfinite(second[[3, 6]]).any()
    np.testing.assert_array_equal(second[4], 0)
    alone = run([array[5:6] for array in arrays[:3]] + arrays[3:])
    np.testing.assert_array_equal(first[5], alone[0])


# d, f, experts, experts a row, biases
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, False),
    "gpt-oss-20b": (2880, 2880, 32, 4, True),
    "kimi-k2, an eighth": (7168, 2048, 48, 8, False),
    "deepseek-v3, width split in eight": (7168, 256, 256, 8, False),
    "mixtral-8x7b": (4096, 14336, 8, 2, False),
}
ROWS = (1, 8, 9, 32, 64)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", list(SHAPES))
def test_lowers_for_a_gpu(name, rows):
    """The whole of Mosaic's lowering, layouts and shared memory included, runs without a card."""
    from eaglejax.kernels.experts_gpu import experts_gpu

    d, f, count, k, biases = SHAPES[name]
    assert serves(rows, count, d, f, [jnp.bfloat16]) is None
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    bf16 = jnp.bfloat16
    arrays = [
        shape(bf16, rows, d),
        shape(jnp.int32, rows, k),
        shape(jnp.float32, rows, k),
        shape(bf16, count, 2, f, d),
        shape(bf16, count, d, f),
    ]
    if biases:
        arrays += [shape(bf16, count, 2, f), shape(bf16, count, d)]
    activation = "gpt_oss" if biases else "silu"
    lowered = experts_gpu.trace(*arrays, activation=activation).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


def test_layers_share_one_lowering():
    from eaglejax.kernels.experts_gpu import experts_gpu

    def layers(x, ids, weights, gate_up, down):
        for _ in range(3):
            x = x + summed(experts_gpu(x, ids, weights, gate_up, down), x)
        return x

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in problem([[0, 1]])]
    text = jax.jit(layers).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


def test_which_shapes_are_served():
    assert serves(64, 8, 4096, 14336, [jnp.bfloat16]) is None
    assert "64 rows, not 65" in (serves(65, 8, 4096, 14336, [jnp.bfloat16]) or "")
    assert "not float32" in (serves(1, 8, 4096, 14336, [jnp.bfloat16, jnp.float32]) or "")
    assert "whole tiles" in (serves(1, 16, 576, 16, [jnp.bfloat16]) or "")
    assert "relu" in (serves(1, 8, 4096, 14336, [jnp.bfloat16], "relu") or "")


@pytest.mark.parametrize("rows", [1, 9, 17, 33, 64])
@pytest.mark.parametrize("d, f", [(128, 64), (2048, 768), (2880, 2880), (7168, 2048), (7168, 256), (4096, 14336)])
def test_rings_fit(rows, d, f):
    columns = padded_rows(rows)
    first, second = gateup_ring(columns, d), down_ring(columns, d, f)
    assert first.stages * (2 * TILE + columns) * first.step * 2 + columns * TILE * 2 <= SHARED
    assert second.stages * (TILE + columns) * second.step * 2 + columns * TILE * 4 <= SHARED
    assert d % first.step == 0 == f % second.step and first.stages <= d // first.step + 1
    assert second.parts == down_ring(8, d, f).parts <= f // second.step


def test_the_choice_by_name(monkeypatch):
    monkeypatch.delenv(select.VARIABLE, raising=False)
    assert select.no_pallas()  # this is a CPU
    with select.compiling_for("gpu"):
        assert select.no_pallas() is None and "Pallas" in select.describe()[1]
        monkeypatch.setenv(select.VARIABLE, "xla")
        assert select.no_pallas() and "Pallas" not in select.describe()[1]
    monkeypatch.setenv(select.VARIABLE, "pallas")
    assert select.no_pallas()
    monkeypatch.setenv(select.VARIABLE, "cuda")
    with pytest.raises(ConfigError, match="EAGLEJAX_KERNELS.*auto, xla, pallas"):
        select.no_pallas()


def test_experts_take_the_kernels(monkeypatch):
    arrays = [jnp.asarray(array) for array in problem([[0, 1]])]
    # traced anew: what is chosen depends on more than the arguments
    text = lambda *given: jax.jit(lambda *a: experts(*a)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    with select.compiling_for("gpu"):
        assert "mosaic_gpu" in text(*arrays)
        wide = [array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array for array in arrays]
        assert "mosaic_gpu" not in text(*wide)
        monkeypatch.setenv(select.VARIABLE, "xla")
        assert "mosaic_gpu" not in text(*arrays)
