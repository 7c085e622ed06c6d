"""`convert(quantize=...)`: what is quantised, in which form, and how far from the weights it may be."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import LAYERS, llama_weights, write_safetensors

from eaglejax.checkpoint import quantise as quantise_module
from eaglejax.checkpoint.convert import convert
from eaglejax.checkpoint.quantise import pack
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.errors import CheckpointError, ConfigError

CONFIG = {"model_type": "llama", "hidden_size": 160}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    weights = llama_weights() | {
        "model.layers.0.mlp.gate.weight": np.ones((4, 160), np.float32),
        "model.layers.0.self_attn.kv_b_proj.weight": np.ones((64, 32), np.float32),
        "model.layers.1.mlp.experts.3.up_proj.weight": np.ones((8, 40), ml_dtypes.bfloat16),
        "vision_tower.blocks.0.q_proj.weight": np.ones((8, 32), np.float32),
        "model.layers.1.mlp.experts.gate_up_proj": np.ones((2, 8, 32), np.float32),
        "lm_head.weight": np.ones((10, 160), np.float32),
    }
    weights["model.layers.0.mlp.up_proj.weight"][3] = 0  # a row without a largest weight
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def unpack(words: np.ndarray) -> np.ndarray:
    """As the format says it, one nibble at a time."""
    out = np.zeros((len(words), words.shape[1] * 8), np.int64)
    for column in range(out.shape[1]):
        out[:, column] = ((words[:, column // 8].astype(np.int64) >> (4 * (column % 8))) & 15) - 8
    return out


def test_packing():
    values = np.random.default_rng(0).integers(-8, 8, (5, 64)).astype(np.int8)
    assert np.array_equal(unpack(pack(values)), values)
    # the first value in the lowest bits
    assert pack(np.array([[-7, -8, -8, -8, -8, -8, -8, 7]], np.int8)).view(np.uint32)[0, 0] == 0xF0000001


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_checkpoint(source, tmp_path, kind, to, monkeypatch):
    pytest.importorskip("qwix")
    monkeypatch.setattr(quantise_module, "BLOCK_BYTES", 20_000)  # several blocks of rows a tensor
    convert(source, tmp_path / "new", to=to, quantize=kind)
    plain, made = open_checkpoint(source), open_checkpoint(tmp_path / "new")
    quantised = 0
    for name, info in plain.tensors.items():
        weight = plain.read(name)
        touched = (
            "layers." in name
            and name.endswith("_proj.weight")
            and "kv_b" not in name
            and (kind == "int8" or info.shape[1] != 40)
        )
        if not touched or "vision" in name:
            assert made.read(name).tobytes() == weight.tobytes()
            continue
        quantised += 1
        scale = made.read(f"{name}_scale")
        if kind == "int8":
            values = made.read(name)
            assert values.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (len(weight), 1)
            steps = np.broadcast_to(scale, weight.shape)
            # half a step, and the last half step beyond 127
            bound = 0.501
        else:
            values = unpack(made.read(f"{name}_packed"))
            assert scale.dtype == ml_dtypes.bfloat16 and scale.shape == (len(weight), weight.shape[1] // 32)
            assert made.read(f"{name}_shape").tolist() == list(weight.shape)
            assert name not in made.tensors
            steps = np.repeat(scale.astype(np.float32), 32, axis=1)
            # the scale is rounded to bfloat16 after the values were chosen: up to 2^-8 of 8 steps
            bound = 0.501 + 8 * 2**-8
        error = np.abs(values * steps - weight.astype(np.float32))
        assert (error <= bound * steps).all()
        # the scales are no larger than the weights ask for
        assert np.abs(values).max() >= (127 if kind == "int8" else 7)
    assert quantised == 7 * LAYERS + (kind == "int8")


def test_config(source, tmp_path):
    pytest.importorskip("qwix")
    made = convert(source, tmp_path / "four", to="safetensors", quantize="int4")
    fused, odd = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj"
    assert sorted(made.left_plain) == [f"{odd}.weight", fused]
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    setting = config.pop("quantization_config")
    assert config == CONFIG
    assert (setting["quant_method"], setting["format"]) == ("compressed-tensors", "pack-quantized")
    weights = setting["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["strategy"], weights["group_size"], weights["symmetric"]) == (
        4,
        "group",
        32,
        True,
    )
    assert sorted(setting["ignore"]) == [
        "lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.kv_b_proj", odd, fused,
        "vision_tower.blocks.0.q_proj",
    ]  # fmt: skip
    assert convert(source, tmp_path / "eight", to="safetensors", quantize="int8").left_plain == (fused,)
    setting = json.loads((tmp_path / "eight" / "config.json").read_text())["quantization_config"]
    weights = setting["config_groups"]["group_0"]["weights"]
    assert (setting["format"], weights["num_bits"], weights["strategy"]) == ("int-quantized", 8, "channel")
    # the settings are part of what a conversion is
    with pytest.raises(CheckpointError, match="exists already.*found --quantize=int8, not --quantize=int4"):
        convert(source, tmp_path / "eight", to="safetensors", quantize="int4")
    with pytest.raises(ConfigError, match="the checkpoint is quantised already"):
        convert(tmp_path / "eight", tmp_path / "again", to="safetensors", quantize="int4")


def test_refusals(source, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="quantize: unknown; found 'int5'; expected int8 or int4"):
        convert(source, tmp_path / "new", to="orbax", quantize="int5")
    monkeypatch.setattr(quantise_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="quantising needs the package qwix, which is not installed; pip install"):
        convert(source, tmp_path / "new", to="orbax", quantize="int4")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        convert(source, tmp_path / "new", to="orbax", quantize="int4")
    assert not list(tmp_path.glob("new*"))


def test_weights_that_cannot_be_quantised(tmp_path):
    pytest.importorskip("qwix")
    (tmp_path / "config.json").write_text("{}")
    name = "model.layers.0.mlp.up_proj.weight"
    write_safetensors(tmp_path / "model.safetensors", {"embed.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match="holds no projection that can be quantised; found 1 tensors"):
        convert(tmp_path, tmp_path.parent / "new", to="orbax", quantize="int4")
    write_safetensors(tmp_path / "model.safetensors", {name: np.full((4, 32), np.nan, np.float32)})
    with pytest.raises(CheckpointError, match=f"tensor '{name}' holds values that are no numbers"):
        convert(tmp_path, tmp_path.parent / "new", to="orbax", quantize="int4")
