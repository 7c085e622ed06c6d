"""Tree attention for GPUs other than Hopper's, without one: interpreted against float64; lowered for CUDA; compiled, given jax's plugin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import arguments, problem, reference, zeros
from jax.sharding import AbstractDevice, AbstractMesh

from eaglejax.errors import ConfigError
from eaglejax.kernels import select
from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.rows import Step
from eaglejax.sharding.absent_gpu import PLACES, absent_gpus

OLD = jax.__version_info__ < (0, 11)
pytestmark = [
    pytest.mark.skipif(OLD, reason="Pallas kernels for GPUs are written for jax 0.11 and later"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32
MOST_ERROR = {BFLOAT16: 1e-2, FLOAT32: 1e-5}  # relative to the largest value

# as `attention_cases.problem` takes them
CASES = {
    "ragged, whole cache": dict(lengths=(0, 150, 65), size=150, rows=(4, 0), heads=(1, 3), widths=(64, 64)),
    "exact, with sinks": dict(lengths=(0, 33), size=70, rows=(3, 2), heads=(2, 2), widths=(32, 32), dtype=FLOAT32, sinks=True),
    "several blocks of rows": dict(lengths=(65,), size=96, rows=(9, 2), heads=(1, 8)),
    "step rows of several tiles": dict(lengths=(70,), size=72, rows=(70, 0), heads=(1, 1), widths=(16, 16), seen=8),
    "window": dict(lengths=(0, 190), size=201, rows=(3, 2), heads=(1, 2), widths=(32, 32), window=70),
    "window of few": dict(lengths=(100,), size=128, rows=(4, 0), heads=(1, 1), widths=(16, 16), window=2, dtype=FLOAT32),
    "sinks": dict(lengths=(0, 130), size=144, rows=(2, 0), heads=(2, 3), widths=(64, 64), sinks=True),
    "heads of 96": dict(lengths=(70,), size=71, rows=(5, 1), heads=(1, 2), widths=(96, 96)),
    "widths of several blocks": dict(lengths=(30,), size=33, rows=(2, 0), heads=(2, 1), widths=(80, 48), dtype=FLOAT32),
    "wide": dict(lengths=(70,), size=72, rows=(2, 0), heads=(1, 2), widths=(256, 256)),
    "expanded latent": dict(lengths=(70,), size=72, rows=(2, 0), heads=(1, 1), widths=(192, 128)),
    "absorbed latent": dict(lengths=(0, 70), size=72, rows=(2, 0), heads=(1, 4), widths=(576, None)),
    "absorbed latent, exact": dict(lengths=(40,), size=42, rows=(2, 0), heads=(1, 4), widths=(576, None), dtype=FLOAT32),
}  # fmt: skip


def interpreted(given, p, window=None):
    """The kernel's result in float32. What no program has written is NaN in the interpreter."""
    from eaglejax.kernels.tree_attention_portable import serves, tree_attention_portable

    assert serves(*given[:3], p["value_dim"]) is None
    sinks = None if p["sinks"] is None else jnp.asarray(p["sinks"])
    fixed = dict(scale=p["queries"].shape[-1] ** -0.5, value_dim=p["value_dim"], window=window, sinks=sinks)
    return np.asarray(tree_attention_portable(*given, **fixed, interpret=True).astype(jnp.float32))


@pytest.fixture
def short_ranges(monkeypatch):
    """Ranges of a tile, so that small caches have several."""
    monkeypatch.setattr("eaglejax.kernels.tree_attention_portable.LEAST_RANGE", 16)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, short_ranges):
    case = {"dtype": BFLOAT16, **CASES[name]}
    p, window = problem(**case), case.get("window")
    got = interpreted(arguments(p, case["dtype"]), p, window)
    want = reference(p, p["queries"].shape[-1] ** -0.5, window)
    np.testing.assert_allclose(got, want, rtol=0, atol=MOST_ERROR[case["dtype"]] * np.abs(want).max())


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_a_row_does_not_depend_on_the_rows_asked_for(dtype, short_ranges):
    """Bit for bit: alone with itself as the only step row, and as the root of a tree of nine, in another block of rows than the last."""
    p = problem(lengths=(65, 0), size=70, rows=(9, 0), heads=(1, 4), widths=(32, 32), dtype=dtype)
    queries, rows, cache, step = arguments(p, dtype)
    first = Step(step.positions[:, :1], step.mask[:, :1, :1], step.row_positions[:, :1], step.lengths)
    alone = queries[:, :1], jax.tree.map(lambda x: x[:, :1], rows), cache, first
    np.testing.assert_array_equal(interpreted((queries, rows, cache, step), p)[:, :1], interpreted(alone, p))


def traced(run, leaves, kind):
    """Lowered for a card by its name: the Triton backend asks which one it is."""
    one = AbstractMesh((1,), ("one",), abstract_device=AbstractDevice(kind, None, "cuda"))
    with jax.sharding.use_abstract_mesh(one):
        return jax.jit(run).trace(*leaves).lower(lowering_platforms=("cuda",))


SHAPES = {
    "grouped 128": (32, 4, 128, 128), "SmolLM2": (9, 3, 64, 64), "heads of 96": (32, 32, 96, 96), "wide": (8, 2, 256, 256),
    "expanded latent": (16, 16, 192, 128), "absorbed latent": (16, 1, 576, None),
}  # fmt: skip


def prepared(name, dtype, t, window=None):
    """The kernel at the shape of a real model, as a function of arrays; and those."""
    from eaglejax.kernels.tree_attention_portable import serves, tree_attention_portable

    heads, kv_heads, width, values = SHAPES[name]
    given = zeros(2, t, t + 3, heads, kv_heads, 5000, width, values, dtype)
    assert serves(*given[:3], values or 512) is None
    leaves, structure = jax.tree.flatten(given)

    def run(*leaves):
        return tree_attention_portable(*structure.unflatten(leaves), scale=0.1, value_dim=values or 512, window=window)

    return run, leaves


@pytest.mark.parametrize(("t", "window", "dtype"), [(1, None, BFLOAT16), (4, 128, FLOAT32)])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda(name, dtype, t, window):
    text = traced(*prepared(name, dtype, t, window), "NVIDIA RTX PRO 6000").as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2  # ranges and merge


# what XLA's compiler has to know that is not as for an H200: name, capability, cores, threads and shared memory of one; that of a block
CARDS = {
    "sm_80": ("NVIDIA A100", "major: 8", 108, 2048, 167936, 166912),
    "sm_100": ("NVIDIA B200", "major: 10 feature_extension: ACCELERATED_FEATURES", 148, 2048, 233472, 232448),
    "sm_120": ("NVIDIA RTX PRO 6000", "major: 12 feature_extension: ACCELERATED_FEATURES", 188, 1536, 102400, 101376),
}  # fmt: skip


def description(card):
    """XLA's GpuTargetConfigProto as text."""
    name, capability, cores, threads, shared, of_a_block = CARDS[card]
    text = next(file for place in PLACES if (file := place / "h200.txtpb").is_file()).read_text(encoding="utf-8")
    for old, new in (
        ("NVIDIA H200", name), ("Capability 9.0a", f"Capability {card[3:-1]}.0"),
        ("major: 9 feature_extension: ACCELERATED_FEATURES", capability), ("core_count: 132", f"core_count: {cores}"),
        ("threads_per_core_limit: 2048", f"threads_per_core_limit: {threads}"),
        ("per_core: 233472", f"per_core: {shared}"), ("optin: 232448", f"optin: {of_a_block}"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    return text


# every kind of width on the card of the story; on the others, the products' forms
COMPILED = [
    *(("sm_120", name, BFLOAT16) for name in SHAPES), ("sm_120", "grouped 128", FLOAT32),
    ("sm_80", "grouped 128", BFLOAT16), ("sm_80", "grouped 128", FLOAT32), ("sm_100", "grouped 128", BFLOAT16),
]  # fmt: skip


@pytest.mark.parametrize(("card", "name", "dtype"), COMPILED)
def test_compiles_for_absent_cards(card, name, dtype, tmp_path):
    """Shared memory is enough and no register is spilled. Nothing is run. Needs jax's GPU plugin; without a driver JAX_PLATFORMS=cpu."""
    file = tmp_path / f"{card}.txtpb"
    file.write_text(description(card), encoding="utf-8")
    try:
        (device,) = absent_gpus(str(file), 1)
    except ConfigError as error:
        pytest.skip(str(error))
    assert device.compute_capability == card[3:-1] + ".0"
    run, leaves = prepared(name, dtype, 4)
    there = jax.sharding.SingleDeviceSharding(device)
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there) for leaf in leaves]
    compiled = traced(run, leaves, device.device_kind).compile(
        {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    )
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 2


def test_what_is_refused():
    from eaglejax.kernels.tree_attention_portable import serves

    why = lambda *shape, value_dim=128, dtype=BFLOAT16: serves(*zeros(1, *shape, dtype)[:3], value_dim)
    assert why(4, 4, 8, 2, 33, 128, 128) is None
    assert why(4, 4, 8, 2, 33, 128, 128, dtype=jnp.float16) == "only bfloat16 or float32, the same throughout"
    assert why(4, 4, 8, 2, 0, 128, 128) == "no cached rows"
    assert why(129, 129, 4, 2, 33, 128, 128) == "258 query rows per key/value head, more than 256"
    assert why(1, 1, 1, 1, 33, 72, 128) == "head sizes 72 and 128 are not multiples of 16"
    assert why(1, 1, 1, 1, 33, 640, 640, value_dim=640) == "values of 640, more than 512, do not fit into registers"
    assert why(1, 1, 1, 1, 33, 512, 512, value_dim=512, dtype=FLOAT32) == (
        "head sizes 512 and 512: two tiles do not fit into shared memory"
    )


def test_chosen_where_it_is_asked_for():
    from eaglejax.kernels.select import attention_kernel

    given = zeros(1, 2, 2, 8, 2, 40, 96, 96, FLOAT32)
    used = lambda: (
        "pallas_call"
        in str(jax.jit(lambda *given: tree_attention(*given, scale=0.1, value_dim=96)).trace(*given).jaxpr)
    )
    with select.kernels("pallas"):
        assert attention_kernel() is None and not used()  # this is a CPU
        for capability in ("8.0", "8.9", "10.0", "12.0", "12.1"):
            with select.compiling_for("gpu", capability):
                assert attention_kernel() == "portable" and used() and select.form() == "pallas"
                assert select.no_pallas() == f"not a Hopper GPU (compute capability {capability})"
                assert select.describe()[0] == (
                    "tree attention: Pallas (Triton) in bfloat16 and float32, never run on a card, else XLA, whole cache masked by "
                    f"length; no other kernel of ours: not a Hopper GPU (compute capability {capability}) (gpu)"
                )
        for capability in ("7.5", "gfx942", "unknown"):
            with select.compiling_for("gpu", capability):
                assert attention_kernel() is None and not used()
        with select.compiling_for("gpu", "9.0"):
            assert attention_kernel() == "hopper"
    for form in ("auto", "xla"):
        with select.kernels(form), select.compiling_for("gpu", "12.0"):
            assert attention_kernel() is None and not used() and select.form() == "xla"


def test_bytes_left_for_the_merge():
    """Two slots of four heads, 32 query rows in one block; 16 ranges of 256 rows and the step's, with room for 32 weights; float32."""
    from eaglejax.kernels.tree_attention_portable import left_bytes

    assert left_bytes(2, 4, 32, 4, 128, 128, 4096, latent=False, item=2) == 2 * 4 * 32 * (17 * 128 + 32) * 4
    assert left_bytes(2, 40, 32, 4, 128, 128, 4096, latent=False, item=2) is None  # too many rows
