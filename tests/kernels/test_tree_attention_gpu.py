"""The Pallas form of tree attention without a GPU: interpreted, with race detection, against float64; and lowered for CUDA."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import arguments, problem, reference, zeros

from eaglejax.kernels import select
from eaglejax.kernels.tree_attention import tree_attention

OLD = jax.__version_info__ < (0, 11)
pytestmark = pytest.mark.skipif(OLD, reason="Pallas kernels for GPUs are written for jax 0.11 and later")

# lengths of the slots; cache rows; own rows, earlier rows; key/value heads, group; widths of keys, values (None: of the keys)
CASES = {
    "ragged, whole cache": dict(lengths=(0, 300, 129), size=304, rows=(4, 0), heads=(1, 3)),
    "one row": dict(lengths=(255,), size=264, rows=(1, 0), heads=(2, 8)),
    "16 rows": dict(lengths=(70,), size=104, rows=(16, 0), heads=(1, 3), splits=2),
    "64 columns": dict(lengths=(65,), size=96, rows=(8, 5), heads=(1, 8)),
    "two blocks of rows": dict(lengths=(65,), size=96, rows=(9, 0), heads=(1, 8), splits=2),
    "window": dict(lengths=(0, 290), size=304, rows=(3, 2), heads=(1, 2), window=70, tile=64, splits=2),
    "window of few": dict(lengths=(200,), size=256, rows=(4, 0), heads=(1, 1), window=2, tile=64),
    "sinks": dict(lengths=(0, 130), size=144, rows=(2, 0), heads=(2, 3), sinks=True),
    "narrow": dict(lengths=(190,), size=200, rows=(5, 1), heads=(1, 2), widths=(64, 64)),
    "wide": dict(lengths=(100,), size=152, rows=(2, 0), heads=(1, 2), widths=(256, 256)),
    "expanded latent": dict(lengths=(100,), size=152, rows=(2, 0), heads=(1, 1), widths=(192, 128)),
    "absorbed latent": dict(lengths=(0, 130), size=144, rows=(2, 0), heads=(1, 4), widths=(576, None), splits=2),
    "one range, many tiles": dict(lengths=(400,), size=504, rows=(70, 0), heads=(1, 1), tile=64, splits=1, seen=8),
}  # fmt: skip


@contextlib.contextmanager
def interpreted():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        try:
            yield
        finally:
            races = gpu_callbacks.get_races() if hasattr(gpu_callbacks, "get_races") else None
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert races is None or not races.races_found


# unused rows of the cache, which hold inf and NaN
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    from eaglejax.kernels.tree_attention_gpu import serves, tree_attention_gpu

    case = CASES[name]
    p = problem(**case)
    given = arguments(p)
    assert serves(*given[:3], p["value_dim"]) is None
    scale, window = p["queries"].shape[-1] ** -0.5, case.get("window")
    with interpreted():
        got = tree_attention_gpu(
            *given,
            scale=scale,
            value_dim=p["value_dim"],
            window=window,
            sinks=None if p["sinks"] is None else jnp.asarray(p["sinks"]),
            tile=case.get("tile"),
            splits=case.get("splits", 3),
        )
        got = np.asarray(got.astype(jnp.float32))
    want = reference(p, scale, window)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * np.abs(want).max())


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("t", [1, 3, 8, 17])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "values"), [
    (32, 4, 128, 128), (32, 8, 64, 64), (8, 2, 256, 256), (16, 16, 192, 128), (8, 1, 576, None), (16, 1, 576, None),
])  # fmt: skip
def test_lowers_for_cuda(heads, kv_heads, width, values, t, window):
    """Layouts, registers' shapes and shared memory are checked by the lowering."""
    from eaglejax.kernels.tree_attention_gpu import serves, tree_attention_gpu

    given = zeros(2, t, t + 3, heads, kv_heads, 5000, width, values)
    value_dim = values or 512
    if serves(*given[:3], value_dim) is not None:
        pytest.skip(str(serves(*given[:3], value_dim)))
    leaves, structure = jax.tree.flatten(given)

    def run(*leaves):
        return tree_attention_gpu(*structure.unflatten(leaves), scale=0.1, value_dim=value_dim, window=window)

    text = jax.jit(run).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2  # ranges and merge


def test_chosen_for_hopper_only():
    run = lambda *given: tree_attention(*given, scale=0.1, value_dim=128)
    long, short, exact = (
        zeros(1, 2, 2, 8, 2, size, 128, 128, dtype)
        for size, dtype in ((4096, jnp.bfloat16), (64, jnp.bfloat16), (4096, jnp.float32))
    )
    used = lambda given: "wgmma" in str(jax.jit(run).trace(*given).jaxpr)
    assert select.no_pallas() == "no GPU (cpu)" and not used(long)
    with select.kernels("pallas"), select.compiling_for("gpu"):
        assert used(long) and used(short) and not used(exact)
    with select.kernels("auto"), select.compiling_for("gpu"):
        assert used(long) and not used(short)
    with select.kernels("xla"), select.compiling_for("gpu"):
        assert not used(long) and select.no_pallas() == "XLA was asked for"
