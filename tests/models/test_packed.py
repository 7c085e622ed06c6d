"""Packed weights against the peers that made them, to the bit; and that nothing is widened whole in a compiled forward."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from target_cases import ints, teacher_forced

from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.kernels.experts import experts
from eaglejax.models import packed
from eaglejax.models.layers import Linear, project
from eaglejax.models.packed import PackedWeight, Packing, pack

DATA = Path(__file__).parents[1] / "data" / "quantised"
GOLDEN = Path(os.environ["EAGLEJAX_GOLDEN"]) if "EAGLEJAX_GOLDEN" in os.environ else None


def made(values, scale, packing: Packing, dtype="float32") -> PackedWeight:
    """A packed weight of given arrays, whose scales may be those of whole blocks."""
    *lead, out, width = (*values.shape[:-1], values.shape[-1] * packing.per_byte)
    weight = PackedWeight((*lead, out, width), packing, dtype=dtype)
    r, c = packing.grid(out, width)
    rows, columns = np.arange(0, out, r) // packing.rows, np.arange(0, width, c) // packing.columns
    weight.values.set_value(jnp.asarray(values))
    weight.scale.set_value(jnp.asarray(scale[..., rows[:, None], columns[None]]))
    return weight


def fp8_layer(tensors: dict, layer: str, **kw) -> PackedWeight:
    return made(tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale_inv"], Packing("fp8", 128, 128), **kw)


def int4_layer(tensors: dict, layer: str, **kw) -> PackedWeight:
    values, packing = tensors[f"{layer}.weight_packed"].view(np.uint8), Packing("int4", 1, 32, "bfloat16")
    return made(values, tensors[f"{layer}.weight_scale"], packing, **kw)


LAYERS = {"fp8_block": fp8_layer, "int4_group32": int4_layer}


def golden_layers() -> list:
    stored = [(name, DATA / f"{name}.safetensors", "layer_b") for name in LAYERS]
    if GOLDEN is not None:
        stored += [(name, GOLDEN / f"quant_{name}", layer) for name in LAYERS for layer in ("layer_a", "layer_b")]
    return stored


def load(path: Path) -> dict[str, np.ndarray]:
    files = [path] if path.is_file() else [path / "model.safetensors", path / "expected.safetensors"]
    # the format's own numpy loader knows no float8
    return {name: reader.read(name) for reader in map(open_checkpoint, files) for name in reader.tensors}


def check(name: str, path: Path, layer: str) -> None:
    tensors = load(path)
    wide = np.asarray(LAYERS[name](tensors, layer)[...])
    rounded = np.asarray(LAYERS[name](tensors, layer, dtype="bfloat16")[...])
    np.testing.assert_array_equal(rounded.view(np.uint16), wide.astype(ml_dtypes.bfloat16).view(np.uint16))
    if f"{layer}.weight_float32" in tensors:
        np.testing.assert_array_equal(wide.view(np.uint32), tensors[f"{layer}.weight_float32"].view(np.uint32))
    if f"{layer}.weight_bfloat16" in tensors:
        # the FP8 case ran in Triton's CPU interpreter, which cuts a float32 off to bfloat16 where a GPU rounds it
        cut = name == "fp8_block"
        ours = (wide.view(np.uint32) >> 16).astype(np.uint16) if cut else rounded.view(np.uint16)
        np.testing.assert_array_equal(ours, tensors[f"{layer}.weight_bfloat16"].view(np.uint16))
    weight = LAYERS[name](tensors, layer)
    if f"{layer}.int_values" in tensors:
        exact = tensors[f"{layer}.int_values"].astype(np.float64) * np.repeat(
            tensors[f"{layer}.weight_scale"].astype(np.float64), 32, axis=1
        )
        np.testing.assert_array_equal(weight[...], exact.astype(np.float32))
    got = project(jnp.asarray(tensors[f"{layer}.input"]), weight[...])
    np.testing.assert_allclose(got, tensors[f"{layer}.output"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name, path, layer", golden_layers())
def test_peers_weights_to_the_bit(name, path, layer):
    check(name, path, layer)


@pytest.mark.parametrize("name", LAYERS)
def test_a_wrong_block_is_seen(monkeypatch, name):
    wrong = {"fp8_block": Packing("fp8", 64, 128), "int4_group32": Packing("int4", 1, 96, "bfloat16")}[name]
    monkeypatch.setitem(globals(), "Packing", lambda *_: wrong)
    with pytest.raises((AssertionError, IndexError)):
        check(name, DATA / f"{name}.safetensors", "layer_b")


def test_mxfp4_as_transformers_widens_it():
    tensors = load_file(DATA / "mxfp4.safetensors")
    blocks = tensors["blocks"]
    weight = made(blocks.reshape(*blocks.shape[:2], -1), tensors["scales"], Packing("mxfp4", 1, 32, "uint8"))
    want = np.swapaxes(tensors["weight_float32"], 1, 2)
    np.testing.assert_array_equal(np.asarray(weight[...]).view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


def test_smallest_exponents_of_mxfp4():
    got = np.asarray(packed._exponents(jnp.arange(1, 255, dtype=jnp.uint8)))
    np.testing.assert_array_equal(got, 2.0 ** (np.arange(1, 255) - 127.0).astype(np.float64))
    assert np.asarray(packed._exponents(jnp.zeros(1, jnp.uint8))).view(np.uint32)[0] == 1 << 22  # 2^-127


def test_indexing_and_taking_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (5, 6, 8), np.uint8)
    scale = rng.standard_normal((5, 6, 2)).astype(ml_dtypes.bfloat16)
    weight = made(values, scale, Packing("int4", 1, 8, "bfloat16"))
    whole = np.asarray(weight[...])
    assert weight.shape == whole.shape == (5, 6, 16) and weight.ndim == 3
    np.testing.assert_array_equal(weight[3], whole[3])
    np.testing.assert_array_equal(weight.take(jnp.array([[4, 0], [9, 2]])), whole[[[4, 0], [4, 2]]])
    assert weight.dense(jnp.bfloat16).dtype == jnp.bfloat16


def test_pack_keeps_metadata():
    def build():
        layer = Linear(16, (2, 6), axes=(None, "k", "d"), dtype="bfloat16")
        layer.weight = nnx.Param(layer.weight[...], axes=(None, "k", "d"), mesh_axes=(None, "model", None))
        pack(layer, {"weight": Packing("int4", 1, 8, "bfloat16")})
        return layer

    layer = nnx.eval_shape(build)
    assert isinstance(layer.weight, PackedWeight) and layer.weight.dtype == jnp.bfloat16
    assert layer.weight.values.shape == (2, 6, 8) and layer.weight.scale.shape == (2, 6, 2)
    for part in (layer.weight.values, layer.weight.scale):
        metadata = part.get_metadata()
        assert metadata["axes"] == (None, "k", "d") and metadata["mesh_axes"] == (None, "model", None)


E, F, D = 8, 24, 32


def random_experts(kind: str) -> tuple[PackedWeight, PackedWeight]:
    rng = np.random.default_rng(1)
    packing = {
        "fp8": Packing("fp8", 16, 16),
        "int8": Packing("int8", 1, 24),
        "int4": Packing("int4", 1, 8, "bfloat16"),
        "mxfp4": Packing("mxfp4", 1, 8, "uint8"),
    }[kind]

    def one(*shape):
        weight = PackedWeight(shape, packing, dtype="float32")
        raw = rng.integers(0, 120, weight.values.shape, np.uint8)
        weight.values.set_value(jnp.asarray(raw.view(weight.values.dtype)))
        scale = rng.integers(120, 126, weight.scale.shape) if kind == "mxfp4" else rng.random(weight.scale.shape) / 9
        weight.scale.set_value(jnp.asarray(scale.astype(weight.scale.dtype)))
        return weight

    return one(E, 2, F, D), one(E, D, F)


def big_floats(text: str, size: int) -> list[str]:
    """Arrays of plain floats in a compiled program with at least `size` elements."""
    found = re.findall(r"\b(f32|bf16|f16|f64)\[([\d,]+)\]", text)
    return sorted({f"{kind}[{dims}]" for kind, dims in found if np.prod([int(n) for n in dims.split(",")]) >= size})


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "mxfp4"])
def test_experts_widen_only_what_was_chosen(kind, gather):
    gate_up, down = random_experts(kind)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((1, D)), jnp.float32)
    ids, weights = jnp.array([[1, 6]], jnp.int32), jnp.array([[0.25, 0.75]], jnp.float32)
    graph, state = nnx.split((gate_up, down))

    def run(state, x, whole: bool):
        pair = nnx.merge(graph, state)
        pair = [weight[...] for weight in pair] if whole else pair
        return experts(x, ids, weights, *pair, gather=gather)

    # as a user would compile it, whatever the tests' own settings are
    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    compiled = {
        whole: jax.jit(run, static_argnums=2).lower(state, x, whole).compile(options) for whole in (True, False)
    }
    np.testing.assert_allclose(compiled[False](state, x), compiled[True](state, x), atol=1e-5, rtol=1e-5)
    # two experts are chosen; all eight hold this many
    assert big_floats(compiled[False].as_text(), E * D * F) == []
    assert big_floats(compiled[True].as_text(), E * D * F) != []


@pytest.mark.skipif(GOLDEN is None, reason="needs EAGLEJAX_GOLDEN")
@pytest.mark.parametrize("name", ["target_deepseek_v3_fp8", "target_kimi_k2_int4"])
def test_golden_targets(monkeypatch, name):
    """The peer rounds INT4 weights to bfloat16 before it computes in float32; with that rounding put in, all agrees."""
    original = packed.dequantise
    if name.endswith("int4"):
        rounded = lambda v, s, p, dtype: original(v, s, p, jnp.bfloat16).astype(dtype)
        monkeypatch.setattr(packed, "dequantise", rounded)
    target, want = load_target(GOLDEN / name), load_file(GOLDEN / name / "expected.safetensors")
    logits, captured, _ = teacher_forced(target, ints(want["input_ids"]))
    np.testing.assert_allclose(logits, want["logits"], atol=1e-4, rtol=0)
    for layer, got in enumerate(captured[1:]):
        np.testing.assert_allclose(got, want[f"hidden_out_{layer}"], atol=1e-4, rtol=0)
    for tensor, value in want.items():
        if tensor.startswith("dequantized."):
            np.testing.assert_array_equal(weight_of(target, tensor.removeprefix("dequantized.model.")), value)


def weight_of(target, name: str) -> np.ndarray:
    """A weight of the model in float32 by its name in the checkpoint."""
    _, index, block, *rest = name.split(".")
    layer = target.layers[int(index)]
    match rest:
        case ["down_proj", _]:
            return np.asarray(layer.mlp.down.weight[...])
        case ["experts", expert, "down_proj", _]:
            return np.asarray(layer.mlp.experts.down[int(expert)])
        case ["experts", expert, "up_proj", _]:
            return np.asarray(layer.mlp.experts.gate_up[int(expert)][1])
        case ["q_b_proj", _]:
            return np.asarray(layer.attention.q_b.weight[...])
        case ["kv_b_proj", _]:
            both = np.concatenate((layer.attention.key_up[...], layer.attention.value_up[...]), axis=1)
            return both.reshape(-1, both.shape[-1])
    raise AssertionError(name)
