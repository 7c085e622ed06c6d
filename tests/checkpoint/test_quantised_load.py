"""Quantised checkpoints: on one device and on eight, whatever the split, the weights are those of the plain checkpoint;
whatever does not fit is refused by name before anything is allocated."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from quantised_files import CASES, case_tensors, compressed, plain_config, widen, write_case

from eaglejax.checkpoint import leaf_blocks, quantised_parts, streaming
from eaglejax.checkpoint.quantised import find_quantisation
from eaglejax.checkpoint.reader import CheckpointReader
from eaglejax.checkpoint.target_loader import build_target, load_target, open_target
from eaglejax.checkpoint.weight_plan import View
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models import packed
from eaglejax.models.layers import leaves
from eaglejax.models.packed import PackedWeight, Packing
from eaglejax.models.rows import causal_step
from eaglejax.models.target import Target

DEVICES = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Quantised and plain folders of a case, written once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(case: str) -> tuple[Path, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            config, stored, exact = case_tensors(case)
            made[case] = (
                write_case(folder / "quantised", config, stored),
                write_case(folder / "plain", plain_config(config), exact),
            )
        return made[case]

    return get


def plain_leaves(target, ours: bool = False) -> dict[str, np.ndarray]:
    """Every weight of a model by the path it has in a plain one; `ours`: widened as the model does it."""
    found = {}
    for path, node in nnx.iter_graph(target):
        name = ".".join(map(str, path))
        if isinstance(node, PackedWeight) and ours:
            found[name] = np.asarray(node.dense(jnp.float32))
        elif isinstance(node, PackedWeight):
            arrays = (np.asarray(part[...]) for part in (node.values, node.scale))
            found[name] = widen(*arrays, node.packing.kind)
        elif isinstance(node, nnx.Param) and not name.endswith((".values",)) and f"{name[:-6]}" not in found:
            found[name] = np.asarray(node[...])
    return {name: value for name, value in found.items() if not name.endswith("weight.scale")}


def same_weights(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def kinds(target) -> set[str]:
    return {node.packing.kind for _, node in nnx.iter_graph(target) if isinstance(node, PackedWeight)}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_plain_ones_to_the_bit(folders, case):
    quantised, plain = folders(case)
    report = LoadReport()
    target = load_target(quantised, report=report)
    assert kinds(target) == {case.split("_")[0]}
    same_weights(plain_leaves(target, ours=True), plain_leaves(load_target(plain)))
    assert "stay" in str(report) and ("weights only" in str(report)) == (case in ("fp8_block", "fp8_channel"))


FAULTS = {
    "nibbles swapped": ("int4_group", packed, "_nibbles", lambda v: original_nibbles(v << 4 | v >> 4)),
    "offset of the view lost": ("fp8_block", View, "source", lambda self, index: tuple(index[a] for a in self.order)),
    "grid of whole blocks": (
        "fp8_block",
        leaf_blocks,
        "axis_groups",
        lambda shape, split: [[0], [1], [2]][: len(shape)],
    ),
    "exponent off by one": ("mxfp4", packed, "_exponents", lambda s: original_exponents(s + jnp.uint8(1))),
    "rows of the view ignored": ("fp8_block", quantised_parts, "leaf_rows", lambda form, rows: rows),
}
original_nibbles, original_exponents = packed._nibbles, packed._exponents


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(folders, monkeypatch, fault):
    case, owner, name, wrong = FAULTS[fault]
    quantised, plain = folders(case)
    want = plain_leaves(load_target(plain))
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, ValueError, IndexError, TypeError)):
        same_weights(plain_leaves(load_target(quantised), ours=True), want)


def split_build(target_config, pick, devices=DEVICES, dtype="float32"):
    """A target of one of `devices` devices: each leaf is split along the axis that `pick` takes of those that divide."""

    def build() -> Target:
        target = Target(target_config, dtype=dtype)
        for path, variable in leaves(target).items():
            # a part must hold an even number of weights a row, as two may lie in a byte
            last = len(variable.shape) - 1
            fits = [a for a, n in enumerate(variable.shape) if n % devices == 0 and (a < last or n // devices % 2 == 0)]
            axes: list[str | None] = [None] * len(variable.shape)
            shape = list(variable.shape)
            if fits:
                axes[pick(fits)], shape[pick(fits)] = "model", shape[pick(fits)] // devices
            *parents, name = path.split(".")
            owner = target
            for step in parents:
                owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
            setattr(owner, name, nnx.Param(jnp.zeros(shape, variable.dtype), axes=variable.axes, mesh_axes=tuple(axes)))
        return target

    return build


def mesh_of(shape=(1, DEVICES)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def device_parts(node) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """Each device's own plain weights, made of its own values and scales alone, with their place in the whole."""
    if isinstance(node, nnx.Param):
        return [(shard.index, np.asarray(shard.data)) for shard in node.get_value().addressable_shards]
    scales = {shard.device: shard.data for shard in node.scale.get_value().addressable_shards}
    parts = []
    for shard in node.values.get_value().addressable_shards:
        weights = widen(np.asarray(shard.data), np.asarray(scales[shard.device]), node.packing.kind)
        *lead, row = shard.index
        per = node.packing.per_byte
        whole = slice(None if row.start is None else row.start * per, None if row.stop is None else row.stop * per)
        parts.append(((*lead, whole), weights))
    return parts


@pytest.mark.parametrize("pick", [min, max], ids=["first axis", "last axis"])
@pytest.mark.parametrize("case", CASES)
def test_every_split_over_eight_devices(folders, case, pick):
    quantised, plain = folders(case)
    want = plain_leaves(load_target(plain))
    reading, reader = open_target(quantised)
    target = build_target(reading, reader, "float32", LoadReport(), mesh_of(), split_build(reading.config, pick))
    split = 0
    nodes = {".".join(map(str, path)): node for path, node in nnx.iter_graph(target)}
    for name, value in want.items():
        parts = device_parts(nodes[name])
        assert len(parts) == DEVICES
        split += any(part.size < value.size for _, part in parts)
        for index, part in parts:
            np.testing.assert_array_equal(part, value[index], err_msg=f"{name} {index}")
    assert split > len(want) // 3
    # what is dequantised as one array over the mesh is the same
    same_weights(plain_leaves(target), want)


def test_a_fault_in_the_split_is_seen(folders, monkeypatch):
    right = streaming.source_index

    def next_device(variable, shape, index):
        """Every device gets the block of the one after it."""
        cut = right(variable, shape, index)
        size = [part.stop - part.start for part in cut]
        start = [(part.start + n) % whole for part, n, whole in zip(cut, size, shape, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))

    monkeypatch.setattr(streaming, "source_index", next_device)
    with pytest.raises(AssertionError):
        test_every_split_over_eight_devices(folders, "int4_group", min)
    # the scales of whole blocks where a device's part cuts them
    monkeypatch.setattr(streaming, "source_index", right)
    monkeypatch.setattr(leaf_blocks, "_cells", shifted(leaf_blocks._cells))
    with pytest.raises((AssertionError, IndexError)):
        test_every_split_over_eight_devices(folders, "fp8_block", min)


def shifted(cells):
    """Scales found as if every block of a leaf began where the leaf does."""
    start_at_zero = lambda index: tuple(slice(0, part.stop - part.start) for part in index)
    return lambda scales, index, step: cells(scales, start_at_zero(index), step)


@pytest.mark.parametrize("form", ["quantised", "plain"])
def test_repeated_blocks(folders, form):
    """Two key/value heads on eight devices: four of them hold the first, four the second."""
    folder = dict(zip(("quantised", "plain"), folders("fp8_channel"), strict=True))[form]
    whole = plain_leaves(load_target(folder))["layers.0.attention.kv.weight"]
    reading, reader = open_target(folder)
    head = reading.config.layers[0].attention.head_dim

    def build() -> Target:
        target = Target(reading.config, dtype="float32")
        old = target.layers[0].attention.kv.weight
        local = jnp.zeros((2, head, old.shape[2]))
        metadata = dict(axes=old.axes, mesh_axes=(None, "model", None), repeats=(1, 4, 1))
        target.layers[0].attention.kv.weight = nnx.Param(local, **metadata)
        return target

    target = build_target(reading, reader, "float32", LoadReport(), mesh_of(), build)
    parts = device_parts(target.layers[0].attention.kv.weight)
    assert len(parts) == DEVICES
    for index, part in parts:
        place = index[1].start // head // 4
        np.testing.assert_array_equal(part, whole[:, place * head : (place + 1) * head])


def test_the_same_over_data_and_model(folders):
    """Devices of one model part hold the same, and it is read once."""
    quantised, plain = folders("fp8_block")
    want = plain_leaves(load_target(plain))
    reading, reader = open_target(quantised)
    build = split_build(reading.config, min, devices=2)
    target = build_target(reading, reader, "float32", LoadReport(), mesh_of((4, 2)), build)
    same_weights(plain_leaves(target), want)
    assert reader.bytes_read <= 1.05 * sum(info.nbytes for info in reader.tensors.values())


def logits_of(target) -> np.ndarray:
    graph, state = nnx.split(target)

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        tokens = jnp.arange(3, 15, dtype=jnp.int32).reshape(1, 12)
        step = causal_step(jnp.zeros(1, jnp.int32), 12)
        return model.logits(model(tokens, step, model.empty_caches(1, 0)).hidden)

    return np.asarray(run(state))


def test_logits_are_those_of_the_plain_model(folders):
    for case in ("mxfp4", "fp8_block", "int4_group"):
        quantised, plain = folders(case)
        got, want = logits_of(load_target(quantised)), logits_of(load_target(plain))
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


# ---- refusals

Q = "model.layers.1.self_attn.q_b_proj.weight"
EMBEDDING, DOWN_SCALES = "model.embed_tokens.weight", "model.layers.0.mlp.experts.down_proj_scales"
EXPERT = "language_model.model.layers.1.mlp.experts.3.up_proj.weight"


def drop(name):
    return lambda tensors: tensors.pop(name)


def change(name, how):
    return lambda tensors: tensors.__setitem__(name, np.ascontiguousarray(how(tensors[name])))


REFUSED = [
    ("fp8_block", drop(f"{Q}_scale_inv"), f"'{Q}_scale_inv', the scales of.*is missing"),
    ("fp8_block", change(f"{Q}_scale_inv", np.transpose), r"weight_scale_inv' has the wrong shape.*\[2, 8\].*transposed.*\[8, 2\]"),
    ("fp8_block", change(f"{Q}_scale_inv", lambda s: s[:-1]), r"has the wrong shape.*found \[7, 2\]; expected \[8, 2\]"),
    ("fp8_block", change(f"{Q}_scale_inv", lambda s: s.astype(np.int32)), "cannot be a scale.*I32.*F32"),
    ("fp8_block", change(Q, lambda w: w.astype(np.float32)), "not quantised and has scales"),
    ("fp8_block", change(Q, lambda w: w.astype(ml_dtypes.float8_e5m2)), "cannot be read.*F8_E5M2"),
    ("fp8_block", change(Q, lambda w: w[:-1]), r"q_b_proj.weight' has the wrong shape"),
    ("fp8_block", change(EMBEDDING, lambda w: w.astype(ml_dtypes.float8_e4m3fn)), "embed_tokens.*cannot be read.*F8_E4M3"),
    ("int4_group", drop(f"{EXPERT}_scale"), f"'{EXPERT}_scale', the scales of"),
    ("int4_group", drop(f"{EXPERT}_packed"), f"'{EXPERT}' is missing"),
    ("int4_group", drop(f"{EXPERT}_shape"), "weight_shape' is missing"),
    ("int4_group", change(f"{EXPERT}_shape", lambda s: s[::-1]), r"weight_shape' contradicts.*\[64, 48\].*\[48, 64\]"),
    ("int4_group", change(f"{EXPERT}_packed", lambda w: w[:, :-1]), r"weight_packed' has the wrong shape.*I32 \[48, 7\].*I32 \[48, 8\]"),
    ("int4_group", change(f"{EXPERT}_packed", lambda w: w.view(np.uint8)), "not quantised as quantization_config says.*U8.*I32"),
    ("int4_group", change(f"{EXPERT}_scale", lambda s: s.astype(np.float32)), "quantised in different ways.*bfloat16.*float32"),
    ("mxfp4", drop(DOWN_SCALES), "down_proj_scales', the scales of"),
    ("mxfp4", change(DOWN_SCALES, lambda s: s.transpose(0, 2, 1)), "down_proj_scales' has the wrong shape"),
    ("mxfp4", change(DOWN_SCALES, lambda s: s.astype(np.float32)), "cannot be a scale.*F32.*U8"),
    ("mxfp4", change("model.layers.0.mlp.experts.down_proj_blocks", lambda b: b[..., :8]), "down_proj_blocks' has the wrong shape"),
    ("fp8_channel", change("model.layers.0.self_attn.q_proj.weight_scale", np.transpose), "transposed"),
]  # fmt: skip


@pytest.mark.parametrize("case, edit, words", REFUSED)
def test_refused_from_the_headers(tmp_path, monkeypatch, case, edit, words):
    config, stored, _ = case_tensors(case)
    edit(stored)
    folder = write_case(tmp_path / "m", config, stored)
    monkeypatch.setattr(streaming, "fill", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(CheckpointReader, "read_block", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=words) as caught:
        load_target(folder)
    assert "model.safetensors" in str(caught.value) or "quantised in different ways" in words or "missing" in words


def with_setting(case: str, setting) -> dict:
    config, _, _ = case_tensors(case)
    (config["text_config"] if "text_config" in config else config)["quantization_config"] = setting
    return config


def test_contradictions_of_config_and_files(tmp_path):
    config, stored, _ = case_tensors("int4_group")
    weights = dict(num_bits=4, type="int", strategy="group", group_size=16)
    for setting, words in (
        (None, "config.json has no quantization_config"),
        (compressed("pack-quantized", weights, ("re:.*experts.*",)), "leaves .*experts.* plain"),
        (compressed("pack-quantized", weights | dict(group_size=24)), "groups of 24 do not divide"),
        (compressed("pack-quantized", weights | dict(group_size=32)), "wrong shape.*expected|do not divide"),
        (dict(quant_method="fp8", weight_block_size=[128, 128]), "not quantised as quantization_config says"),
    ):
        folder = write_case(tmp_path / "m", with_setting("int4_group", setting), stored)
        with pytest.raises(CheckpointError, match=words):
            load_target(folder)


INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
CHANNEL = dict(num_bits=8, type="float", strategy="channel")


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method.*'gptq' cannot be read"),
        ({"bits": 4}, "None cannot be read"),
        ({"quant_method": "fp8"}, "weight_block_size.*two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt.*e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "activation_scheme"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert.*list"),
        (compressed("marlin-24", INT4), "marlin-24"),
        (compressed("pack-quantized", INT4 | dict(symmetric=False)), "symmetric.*False"),
        (compressed("pack-quantized", INT4 | dict(actorder="group")), "actorder.*group"),
        (compressed("pack-quantized", INT4 | dict(num_bits=8)), "num_bits.*8.*4"),
        (compressed("pack-quantized", INT4 | dict(group_size=None)), "group_size"),
        (compressed("pack-quantized", INT4 | dict(group_size=0)), "group_size.*0"),
        (compressed("float-quantized", CHANNEL | dict(strategy="tensor_group")), "strategy.*tensor_group"),
        (compressed("float-quantized", CHANNEL, activations=dict(dynamic=False)), "input_activations.*stored scales"),
        (compressed("float-quantized", CHANNEL) | dict(kv_cache_scheme=dict(num_bits=8)), "kv_cache_scheme"),
        (compressed("float-quantized", CHANNEL) | dict(sparsity_config=dict(format="x")), "sparsity_config"),
        (compressed("float-quantized", CHANNEL, ["re:("]), "no valid pattern"),
        (compressed("float-quantized", CHANNEL) | dict(config_groups={}), "no groups"),
    ],
)
def test_settings_that_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words) as caught:
        find_quantisation([({"quantization_config": setting}, "config.json")])
    assert "config.json" in str(caught.value)


def test_settings_of_text_part_and_whole():
    setting = compressed("pack-quantized", INT4)
    places = [({}, "inner"), ({"quantization_config": setting}, "outer")]
    assert find_quantisation(places).groups[0].scheme.columns == 32
    other = json.loads(json.dumps(setting).replace("32", "64"))
    with pytest.raises(ConfigError, match="two different quantisations"):
        find_quantisation([({"quantization_config": other}, "inner"), *places])
    assert find_quantisation([({}, "config.json")]) is None


def test_which_modules_a_setting_names():
    quantisation = find_quantisation(
        [({"quantization_config": compressed("pack-quantized", INT4, ("re:.*self_attn.*",))}, "c")]
    )
    assert quantisation.scheme("model.layers.0.mlp.up_proj") is not None
    assert quantisation.scheme("model.layers.0.self_attn.q_proj") is None
    assert quantisation.scheme("lm_head") is None and quantisation.scheme("language_model.lm_head") is None
    assert quantisation.scheme("model.not_lm_head_at_all") is not None


def test_a_part_of_odd_width_is_refused(folders):
    reading, reader = open_target(folders("int4_padded")[0])

    def build() -> Target:
        target = Target(reading.config, dtype="float32")
        experts = target.layers[1].mlp.experts
        experts.down = nnx.Param(jnp.zeros((10, 32, 3)), axes=experts.down.axes, mesh_axes=(None, None, "model"))
        return target

    with pytest.raises(ConfigError, match="layers.1.mlp.experts.down.*two to a byte"):
        build_target(reading, reader, "float32", LoadReport(), mesh_of((2, 4)), build)


def test_grid():
    packing = Packing("fp8", 128, 128)
    assert packing.grid(144, 200) == (16, 8) and packing.grid(256, 7168) == (128, 128)
    assert Packing("int4", 1, 32).grid(7, 16) == (1, 16)
