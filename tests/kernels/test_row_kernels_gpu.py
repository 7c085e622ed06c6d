"""The kernels between the large products for Hopper GPUs without one: interpreted, with a search for races, and lowered at real shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from eaglejax.kernels import row_kernels, select
from eaglejax.kernels.experts_gpu_shape import Parts, down_ring, padded_rows, summed
from eaglejax.models.config import GQAConfig, RopeConfig
from eaglejax.models.layers import RMSNorm

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels are written for jax 0.11's Pallas")
BF16 = ml_dtypes.bfloat16


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(BF16))


def norm(scale, eps=1e-6):
    made = RMSNorm(scale.shape[0], eps, dtype=jnp.bfloat16)
    made.scale = nnx.Param(scale)
    return made


def interpreted(kernel, *arguments, **options):
    """Races fail the test."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # typed otherwise in jax 0.10
    out = kernel(*arguments, **options, interpret=plgpu.InterpretGPUParams(detect_races=True))
    out = [np.asarray(array) for array in out]
    assert not interpret_pallas_call.get_races().races_found
    return out


def ordered(x):
    """bfloat16 numbers as integers in the order of their size, neighbours one apart."""
    bits = np.asarray(x).view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def ulps(got, want):
    return np.abs(ordered(got) - ordered(want))


def config(heads, kv_heads, head_dim, qk_norm, **rope):
    rope = RopeConfig(theta=10000.0, **{"rotary_dim": head_dim, **rope})
    return GQAConfig(heads, kv_heads, head_dim, rope, qk_norm=qk_norm)


def both_ways(config, batch, rows, seed=0, change=lambda array: array):
    """Interpreted, and in jnp."""
    from eaglejax.kernels.qk_rope_gpu import qk_rope_gpu

    c = config.head_dim
    queries = change(draw(seed, batch, rows, config.heads * c))
    both = change(draw(seed + 1, batch, rows, 2, config.kv_heads * c))
    scales = [1 + draw(seed + 2, c) / 4, 1 + draw(seed + 3, c) / 4] if config.qk_norm else []
    positions = jnp.asarray(np.random.default_rng(seed).integers(0, 4000, (batch, rows)), jnp.int32)
    norms = (norm(scales[0], config.qk_norm_eps), norm(scales[1], config.qk_norm_eps)) if scales else None
    want = row_kernels.norm_rotate(queries, both, norms, positions, config)
    options = {"kv_heads": config.kv_heads, "head_dim": c, "rope": config.rope, "eps": config.qk_norm_eps}
    got = interpreted(qk_rope_gpu, queries, both, positions, *scales, **options)
    assert row_kernels.norm_rotate_serves(batch * rows, config, [queries.dtype]) is None
    return got, [np.asarray(array) for array in want]


CASES = {
    "one head": (config(1, 1, 128, True), 1, 1),
    "qwen3, three rows": (config(32, 4, 128, True), 1, 3),
    "two slots": (config(4, 1, 128, False), 2, 3),
    "two heads a block": (config(32, 4, 64, True), 1, 2),
    "two heads a block, plain": (config(8, 2, 64, False), 2, 1),
    "as many key heads": (config(4, 4, 64, True), 2, 3),
    "wide heads": (config(4, 2, 256, True), 1, 3),
    "part rotated": (config(4, 2, 128, True, rotary_dim=32), 1, 2),
    "interleaved": (config(4, 2, 64, False, rotary_dim=48, interleaved=True), 1, 2),
}


@pytest.mark.parametrize("name", list(CASES))
def test_norm_and_rotation(name):
    given, batch, rows = CASES[name]
    got, want = both_ways(given, batch, rows)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        # a sum in another order may round a norm to the neighbouring bfloat16; the rotation subtracts two such
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), atol=2**-6, rtol=2**-7)
        assert (ulps(mine, theirs) > 0).mean() < (0.01 if given.qk_norm else 1e-3)
    np.testing.assert_array_equal(ordered(got[2]), ordered(want[2]))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bad_rows_spoil_no_others(head_dim):
    given = config(8, 2, head_dim, True)
    spoil = lambda array: array.at[0, 1].set(jnp.nan).at[0, 3].set(jnp.inf)
    clean, _ = both_ways(given, 1, 5)
    spoilt, _ = both_ways(given, 1, 5, change=spoil)
    for one, other in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(ordered(one[:, ::2]), ordered(other[:, ::2]))
        assert not np.isfinite(other[:, 1::2].astype(float)).all()


@pytest.mark.parametrize(("rows", "d"), [(1, 2048), (3, 576), (2, 2880), (5, 128), (1, 8192)])
def test_add_and_norm(rows, d):
    from eaglejax.kernels.add_norm_gpu import add_norm_gpu

    x, update, scale = draw(0, 1, rows, d), draw(1, 1, rows, d), 1 + draw(2, d) / 4
    total, normed = row_kernels.add_norm(x, update, scale, 1e-6)
    got = interpreted(add_norm_gpu, x, update, scale, eps=1e-6)
    assert row_kernels.add_norm_serves(rows, d, [x.dtype]) is None
    np.testing.assert_array_equal(ordered(got[0]), ordered(total))
    assert ulps(got[1], normed).max() <= 2 and (ulps(got[1], normed) > 0).mean() < 0.01


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bad_streams_spoil_no_others():
    from eaglejax.kernels.add_norm_gpu import add_norm_gpu

    x, update, scale = draw(0, 1, 4, 576), draw(1, 1, 4, 576), draw(2, 576)
    clean = interpreted(add_norm_gpu, x, update, scale, eps=1e-6)
    spoilt = interpreted(add_norm_gpu, x.at[0, 1].set(jnp.nan), update.at[0, 3, 5].set(jnp.inf), scale, eps=1e-6)
    for one, other in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(ordered(one[:, ::2]), ordered(other[:, ::2]))
        assert not np.isfinite(other[:, 1::2].astype(float)).all()


def parts_of(seed, parts, rows, d, extra=0):
    """Sums in parts as the experts leave them; rows beyond those of the pass are NaN."""
    sums = np.random.default_rng(seed).standard_normal((parts, rows + extra, d)).astype(np.float32)
    sums[:, rows:] = np.nan
    return Parts(jnp.asarray(sums))


@pytest.mark.parametrize(
    ("lead", "d", "parts", "extra"),
    [((1, 1), 2048, 4, 7), ((1, 3), 576, 3, 5), ((2, 2), 2880, 1, 0), ((3, 3), 132, 8, 7), ((1, 1), 8192, 2, 7)],
)
def test_sums_in_parts(lead, d, parts, extra):
    """The stream bit for bit as in jnp, the norm bit for bit as where the sum is made before."""
    from eaglejax.kernels.add_norm_gpu import add_norm_gpu

    x, scale = draw(0, *lead, d), 1 + draw(2, d) / 4
    update = parts_of(1, parts, lead[0] * lead[1], d, extra)
    total, normed = row_kernels.add_norm(x, update, scale, 1e-6)
    got = interpreted(add_norm_gpu, x, update, scale, eps=1e-6)
    assert got[0].shape == got[1].shape == (*lead, d) and np.isfinite(got[1].astype(float)).all()
    np.testing.assert_array_equal(ordered(got[0]), ordered(total))
    assert ulps(got[1], normed).max() <= 2 and (ulps(got[1], normed) > 0).mean() < 0.01
    before = summed(update, x.reshape(-1, d)).reshape(x.shape)
    for one, other in zip(got, interpreted(add_norm_gpu, x, before, scale, eps=1e-6), strict=True):
        np.testing.assert_array_equal(ordered(one), ordered(other))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bad_parts_spoil_no_other_rows():
    """Nor do the other rows' number and contents show in a row."""
    from eaglejax.kernels.add_norm_gpu import add_norm_gpu

    x, update, scale = draw(0, 1, 5, 576), parts_of(1, 4, 5, 576, 3), draw(2, 576)
    clean = interpreted(add_norm_gpu, x, update, scale, eps=1e-6)
    bad = Parts(update.sums.at[0, 1, 3].set(jnp.nan).at[3, 3].set(jnp.inf))
    spoilt = interpreted(add_norm_gpu, x, bad, scale, eps=1e-6)
    alone = interpreted(add_norm_gpu, x[:, 2:3], Parts(update.sums[:, 2:3]), scale, eps=1e-6)
    for one, other, single in zip(clean, spoilt, alone, strict=True):
        np.testing.assert_array_equal(ordered(one[:, ::2]), ordered(other[:, ::2]))
        np.testing.assert_array_equal(ordered(one[:, 2:3]), ordered(single))
        assert not np.isfinite(other[:, 1::2].astype(float)).all()


# hidden size, and width of an expert: what its sums are cut by
MIXTURES = {
    "qwen3-30b-a3b": (2048, 768),
    "gpt-oss-20b": (2880, 2880),
    "mixtral-8x7b": (4096, 14336),
    "kimi-k2": (7168, 2048),
    "widest": (8192, 512),
}


@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("name", list(MIXTURES))
def test_parts_lower_for_a_gpu(name, rows):
    d, f = MIXTURES[name]
    columns = padded_rows(rows)
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    sums = shape(jnp.float32, down_ring(columns, d, f).parts, columns, d)
    arrays = shape(jnp.bfloat16, 1, rows, d), Parts(sums), shape(jnp.bfloat16, d)  # pyright: ignore[reportArgumentType]
    with select.compiling_for("gpu"):
        traced = jax.jit(lambda *given: row_kernels.add_norm(*given, 1e-6)).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 and "stablehlo.add" not in text


# hidden size and attention
SHAPES = {
    "qwen3-30b-a3b": (2048, config(32, 4, 128, True)),
    "gpt-oss-20b": (2880, config(64, 8, 64, False)),
    "smollm2-135m": (576, config(9, 3, 64, False)),
    "mixtral-8x7b": (4096, config(32, 8, 128, False)),
    "gemma-like": (3840, config(16, 8, 256, True)),
}


@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("name", list(SHAPES))
def test_lowers_for_a_gpu(name, rows):
    """The whole of Mosaic's lowering runs without a card. Three key/value heads of 64 are no whole blocks: XLA's way."""
    d, given = SHAPES[name]
    c = given.head_dim

    def layer(x, update, scale, queries, both, positions, q_scale, k_scale):
        norms = (norm(q_scale), norm(k_scale)) if given.qk_norm else None
        return row_kernels.add_norm(x, update, scale, 1e-6), row_kernels.norm_rotate(
            queries, both, norms, positions, given
        )

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    arrays = [
        *(shape(1, rows, d), shape(1, rows, d), shape(d)),
        *(shape(1, rows, given.heads * c), shape(1, rows, 2, given.kv_heads * c)),
        *(shape(1, rows, dtype=jnp.int32), shape(c), shape(c)),
    ]
    with select.compiling_for("gpu"):
        text = jax.jit(layer).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == (1 if name.startswith("smollm2") else 2)


def test_which_are_served():
    bf16 = [jnp.bfloat16]
    assert "at most 64 rows" in (row_kernels.add_norm_serves(65, 2048, bf16) or "")
    assert "not bfloat16" in (row_kernels.add_norm_serves(1, 2048, [jnp.float32]) or "")
    assert "9000" in (row_kernels.add_norm_serves(1, 9000, bf16) or "")
    assert "heads of 80" in (row_kernels.norm_rotate_serves(1, config(8, 8, 80, False), bf16) or "")
    assert "3 key/value heads" in (row_kernels.norm_rotate_serves(1, config(9, 3, 64, False), bf16) or "")
    assert row_kernels.norm_rotate_serves(1, config(4, 2, 256, False, interleaved=True), bf16) is not None
