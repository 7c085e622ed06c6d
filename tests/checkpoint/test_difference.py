"""Differences: what is written is read, over the base that it belongs to and over no other."""

import json
import re
import shutil

import numpy as np
import pytest
from checkpoint_files import HIDDEN, gguf_entries, llama_weights, write_gguf, write_safetensors
from difference_files import (
    BASE_CONFIG,
    EXPERTS,
    FFN,
    small_config,
    small_layers,
    without_experts,
    write_base,
    write_small,
)
from safetensors.numpy import load_file

from eaglejax import EagleJaxEngine, Sampling
from eaglejax.checkpoint import builtin
from eaglejax.checkpoint.builtin import SHIPPED
from eaglejax.checkpoint.convert import convert
from eaglejax.checkpoint.difference import difference_config
from eaglejax.checkpoint.difference_writer import quantise_rows, write_difference
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.source import resolve
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.cli.prompts import require_tokenizer
from eaglejax.errors import CheckpointError, ConfigError, PromptError
from eaglejax.load_report import LoadReport
from eaglejax.models.layers import leaves
from eaglejax.run_config import RunConfig
from eaglejax.sharding.plan_models import read_models
from eaglejax.text.tokenizer import load_tokenizer

EXPERT = "model.layers.1.mlp.experts.2."


@pytest.fixture
def small(tmp_path):
    return write_small(tmp_path)


def edit(folder, **config):
    """Changes keys of a config.json; None takes one out."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | config
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    write_safetensors(file, tensors)


def test_rows_are_rounded_to_half_a_step_and_zeros_stay():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 5, 64)).astype(np.float32) * np.array([1e-3, 1, 1e3], np.float32)[:, None, None]
    weight[1, 2] = 0
    weight[1, 3] = 0
    weight[1, 3, 7] = np.float32(1e-45)
    values, scale = quantise_rows(weight)
    assert (values.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, (3, 5))
    back = values * scale[..., None]
    assert (np.abs(back - weight) <= 0.501 * scale[..., None] + 1e-44).all()
    assert not back[1, 2:4].any()
    # the largest of a row is hit, so the step cannot be smaller
    assert (np.abs(values).max(-1)[[0, 2]] == 127).all()


def test_what_is_written_is_read(small):
    layers, reader = small_layers(), open_checkpoint(small)
    weights = {name: 0.1 * weight for name, weight in llama_weights().items()}
    layer = layers[1]
    for name, whole in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
        rows = whole.swapaxes(1, 2) if name == "down" else whole
        step = np.abs(rows).max(-1, keepdims=True) / 127
        step = step.swapaxes(1, 2) if name == "down" else step
        for expert in range(EXPERTS):
            got = reader.read(f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight")
            assert got.dtype == np.float32 and got.shape == whole[expert].shape and got.flags.c_contiguous
            assert (np.abs(got - whole[expert]) <= 0.501 * step[expert]).all(), name
    assert np.array_equal(reader.read("model.layers.1.mlp.gate.weight"), layer.router)
    assert np.array_equal(reader.read("model.layers.1.mlp.gate.e_score_correction_bias"), layer.correction)
    for part in ("gate", "up", "down"):
        shared = f"model.layers.1.mlp.shared_experts.{part}_proj.weight"
        assert np.array_equal(reader.read(shared), weights[f"model.layers.1.mlp.{part}_proj.weight"])
        dense = f"model.layers.0.mlp.{part}_proj.weight"
        assert np.array_equal(reader.read(dense), weights[dense])
    assert f"model.layers.1.mlp.{part}_proj.weight" not in reader.tensors
    assert len(reader.tensors) == len(weights) + 2 + 3 * EXPERTS
    # the file of weights alone means the same
    assert open_checkpoint(small / "model.safetensors").tensors == reader.tensors


def test_blocks_are_parts_of_the_whole(small):
    reader = open_checkpoint(small)
    for name in (EXPERT + "gate_proj.weight", EXPERT + "down_proj.weight", "model.layers.1.mlp.gate.weight"):
        whole = reader.read(name)
        assert np.array_equal(reader.read_rows(name, 1, 3), whole[1:3])
        assert np.array_equal(reader.read_block(name, (slice(1, 4), slice(2, 9))), whole[1:4, 2:9])
        flat = reader.read_block(name, (slice(3, 40),), shape=(whole.size,))
        assert np.array_equal(flat, whole.reshape(-1)[3:40])
    before = reader.bytes_read
    reader.read_block(EXPERT + "down_proj.weight", (slice(0, HIDDEN), slice(0, 2)))
    assert reader.bytes_read - before == 2 * HIDDEN + 2 * 4
    before = reader.bytes_read
    reader.read("model.norm.weight")
    assert reader.bytes_read - before == 4 * HIDDEN
    with pytest.raises(CheckpointError, match="'absent' is missing"):
        reader.read("absent")
    with pytest.raises(IndexError):
        reader.read_rows(EXPERT + "gate_proj.weight", 0, FFN + 1)


def test_the_size_and_the_other_files(tmp_path):
    write_base(tmp_path / "base")
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "MODEL_CARD.md").write_text("kept")
    written = write_difference(folder, small_config(), small_layers())
    assert sorted(path.name for path in folder.iterdir()) == ["MODEL_CARD.md", "config.json", "model.safetensors"]
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert (written.config, written.weights) == (sizes["config.json"], sizes["model.safetensors"])
    assert written.total == sum(sizes.values()) - 4
    half = write_difference(folder, small_config(), small_layers(), router_dtype="bfloat16")
    assert written.weights - half.weights >= 2 * EXPERTS * (HIDDEN + 1)
    got = open_checkpoint(folder).read("model.layers.1.mlp.gate.weight").astype(np.float32)
    np.testing.assert_allclose(got, small_layers()[1].router, rtol=2**-8)
    assert load_target(folder).layers[1].mlp.router.weight[...].dtype == np.float32


def test_a_broken_run_of_the_writer_leaves_no_model(small, monkeypatch):
    before = (small / "model.safetensors").read_bytes()

    def cut(file, *_):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("eaglejax.checkpoint.difference_writer.write_file", cut)
    with pytest.raises(OSError, match="no space"):
        write_difference(small, small_config(), small_layers(1))
    assert (small / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match="no such file"):
        load_target(small)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda layers: layers.pop(1), r"layers: other layers.*found \[\]; expected \[1\]"),
        (lambda layers: layers.update({0: layers[1]}), r"found \[0, 1\]"),
        (lambda layers: layers[1].gate.fill(np.nan), "layer 1: gate: holds values that are no finite numbers"),
        (
            lambda layers: object.__setattr__(layers[1], "down", layers[1].up),
            r"layer 1: down: wrong shape.*\[4, 160, 16\]",
        ),
    ],
)
def test_the_writer_refuses_before_it_writes(tmp_path, change, words):
    layers = small_layers()
    change(layers)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        write_difference(tmp_path / "moe", small_config(), layers)
    assert not (tmp_path / "moe").exists()


def test_the_writer_knows_two_dtypes_of_routers(tmp_path):
    with pytest.raises(ConfigError, match="router_dtype: is not supported; found 'int8'"):
        write_difference(tmp_path / "moe", small_config(), small_layers(), router_dtype="int8")


@pytest.mark.parametrize(
    "base, numbers, words",
    [
        ({"model_type": "qwen3"}, {}, "base: model_type: no base for routed experts; found 'qwen3'"),
        ({"mlp_bias": True}, {}, "mlp_bias"),
        ({}, {"width": 20}, "width: must divide.*found 20"),
        ({}, {"dense_layers": 2}, "dense_layers: out of range; found 2; expected 0 to 1"),
        ({}, {"topk": 5}, "topk: out of range; found 5; expected 1 to 4"),
    ],
)
def test_a_config_that_cannot_be_made(base, numbers, words):
    fits = {"dense_layers": 1, "experts": 4, "topk": 2, "width": 16}
    with pytest.raises(ConfigError, match=words):
        difference_config(BASE_CONFIG | base, "b", **fits | numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_its_experts_it_is_the_base(tmp_path, dtype):
    base = write_base(tmp_path / "base")
    write_difference(tmp_path / "moe", small_config(), without_experts(small_layers()))
    moe, dense = load_target(tmp_path / "moe", dtype=dtype), load_target(base, dtype=dtype)
    ours, theirs = leaves(moe), leaves(dense)
    for leaf, variable in theirs.items():
        name = re.sub(r"layers\.1\.mlp\.", "layers.1.mlp.shared.", leaf)
        assert np.array_equal(np.asarray(ours[name][...]), np.asarray(variable[...])), leaf
    assert not np.asarray(ours["layers.1.mlp.experts.down"][...]).any()
    assert np.asarray(ours["layers.1.mlp.experts.gate_up"][...]).any()


def test_a_gguf_base(tmp_path):
    """Names, rows of q and k, config and tokenizer come from a GGUF file as from a folder."""
    weights = {name: 0.1 * weight for name, weight in llama_weights().items()}
    write_gguf(tmp_path / "base.gguf", gguf_entries(weights))
    theirs = open_checkpoint(tmp_path / "base.gguf")
    assert theirs.hf_config is not None
    config = difference_config(theirs.hf_config, "../base.gguf", dense_layers=1, experts=4, topk=2, width=FFN)
    write_difference(tmp_path / "moe", config, small_layers())
    reader = open_checkpoint(tmp_path / "moe")
    assert reader.gguf_tokenizer == theirs.gguf_tokenizer is not None
    for part in ("self_attn.q_proj", "self_attn.k_proj"):
        name = f"model.layers.1.{part}.weight"
        assert np.array_equal(reader.read(name), weights[name])
        assert np.array_equal(reader.read_block(name, (slice(2, 5), slice(1, 7))), weights[name][2:5, 1:7])
    report = LoadReport()
    load_target(tmp_path / "moe", report=report)
    assert "a difference on the base ../base.gguf" in str(report) and "4 routed experts in 1 layers" in str(report)


def test_ends_of_text_are_the_bases(small):
    base = small.parent / "base"
    (base / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    reader = open_checkpoint(small)
    assert reader.hf_config is not None and reader.hf_config["eos_token_id"] == [4, 5]
    assert load_target(small).config.eos_token_ids == (4, 5)
    assert reader.text_folder == small / "../base"


def test_the_tokenizer_is_the_bases(small, data):
    with pytest.raises(PromptError, match="has no tokenizer"):
        require_tokenizer(str(small), "--prompt")
    for file in (data / "text" / "letters").iterdir():
        shutil.copy(file, small.parent / "base")
    require_tokenizer(str(small), "--prompt")
    ours, theirs = load_tokenizer(small, open_checkpoint(small)), load_tokenizer(small.parent / "base")
    assert ours.encode("abba") == theirs.encode("abba") and ours.vocab_size == theirs.vocab_size


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(
    "config, words",
    [
        ({"eaglejax": {"base": "../nowhere", "difference": "int8-rows"}}, "eaglejax.base: the base.*not there.*'../nowhere'"),
        ({"eaglejax": {"difference": "int8-rows"}}, "eaglejax.base: names no base; found None"),
        ({"eaglejax": {"base": "../base"}}, "eaglejax.difference: a form.*not known; found None; expected 'int8-rows'"),
        ({"eaglejax": {"base": "../base", "difference": "int4"}}, "found 'int4'"),
        ({"eaglejax": {"base": "../base", "difference": "int8-rows", "lora": 1}}, "keys that are not understood; found lora"),
        ({"eaglejax": {"base": ".", "difference": "int8-rows"}}, "is a difference itself"),
        ({"model_type": "qwen3"}, "architectures name different models"),
        ({"hidden_size": 128}, "config.json: hidden_size: does not fit the base.*found 128; expected 160"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: does not fit"),
        ({"rope_theta": 5e4}, "rope_theta: does not fit"),
        ({"partial_rotary_factor": 0.5}, "rope_theta: does not fit"),
        ({"use_qk_norm": True}, "use_qk_norm: does not fit"),
        ({"n_shared_experts": 5}, r"n_shared_experts.*does not fit.*found \[80, 96\]; expected \[96\]"),
        ({"eos_token_id": 7}, "eos_token_id: does not fit.*found 7; expected 3"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: does not fit"),
        ({"quantization_config": {"quant_method": "fp8"}}, "are not quantised in this way"),
        ({"moe_intermediate_size": 8, "n_shared_experts": 12}, r"gate_proj' is not what.*I8 \[4, 16, 160\].*\[4, 8, 160\]"),
        ({"n_routed_experts": 8}, r"mlp.gate.weight' is not what.*\[4, 160\].*\[8, 160\]"),
        ({"first_k_dense_replace": 0}, "8 of the 16 tensors.*missing.*model.layers.0.mlp.gate.weight"),
        ({"first_k_dense_replace": 2}, "8 tensors have no place"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit(small, config, words):
    edit(small, **config)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        load_target(small)


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.up_proj_scale"), "1 of the 8 tensors.*no 'model.layers.1.mlp.experts.up"),
        (lambda t: t.update(more=np.ones(2, np.float32)), "1 tensors have no place.*found more"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_proj": np.zeros((4, 16, 160), np.uint8)}),
            r"gate_proj' is not what.*found U8 \[4, 16, 160\]; expected I8 \[4, 16, 160\]",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_proj_scale": np.zeros((4, 1), np.float32)}),
            r"scale' is not what.*found F32 \[4, 1\]; expected F32 \[4, 16\]",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.weight": np.zeros((4, 160), np.float16)}),
            "found F16.*expected F32 or BF16",
        ),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit(small, change, words):
    edit_tensors(small, change)
    with pytest.raises(CheckpointError, match=words) as e:
        load_target(small)
    assert str(small / "model.safetensors") in str(e.value)


def test_a_base_that_does_not_fit(small):
    base = small.parent / "base"
    edit(base, model_type="mistral", architectures=None)
    with pytest.raises(ConfigError, match="base/config.json: is no base for routed experts; found mistral"):
        load_target(small)
    (base / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_target(small)


def test_a_base_that_lacks_a_tensor(small):
    edit_tensors(small.parent / "base", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match="layers.1.mlp.shared_experts.up_proj.weight' is missing"):
        load_target(small)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite(small, bad):
    def spoil(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_transposed_scale"][2, 3] = bad
        tensors["model.layers.1.mlp.experts.down_proj_transposed"][2, 3, 0] = 0

    edit_tensors(small, spoil)
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight: weights that are not finite"):
        load_target(small)


def test_a_draft_with_a_manifest_is_no_difference(small):
    edit(small.parent / "base", eaglejax={"boundaries": [1, 2, 3]})
    assert "model.layers.1.mlp.up_proj.weight" in open_checkpoint(small.parent / "base").tensors


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_converted_it_is_one_whole_checkpoint(small, tmp_path, to):
    """Everything of both in one folder that needs neither; by the reader of such folders the same model."""
    base = small.parent / "base"
    (base / "tokenizer.json").write_text("{}")
    (base / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    (small / "MODEL_CARD.md").write_text("card")
    done = convert(small, tmp_path / "whole", to=to, max_bytes=200_000)
    assert done.parts > 1 and done.left_out == ()
    alone = (tmp_path / "whole").rename(tmp_path / "alone")
    loaded = load_target(small)
    shutil.rmtree(base)
    names = {path.name for path in alone.iterdir()}
    assert {"MODEL_CARD.md", "config.json", "tokenizer.json", "generation_config.json"} <= names
    config = json.loads((alone / "config.json").read_text())
    assert "eaglejax" not in config and config["eos_token_id"] == [4, 5]
    again = load_target(alone)
    assert again.config == loaded.config
    ours, theirs = leaves(again), leaves(loaded)
    assert ours.keys() == theirs.keys()
    for leaf, variable in theirs.items():
        assert np.array_equal(np.asarray(ours[leaf][...]), np.asarray(variable[...])), leaf


def test_converted_twice_it_is_done_already(small, tmp_path):
    """The weights of base and difference have one name: the record keeps them apart."""
    convert(small, tmp_path / "whole", to="safetensors")
    assert convert(small, tmp_path / "whole", to="safetensors").already_done
    write_difference(small, small_config(), small_layers(1))
    with pytest.raises(CheckpointError, match="changed source"):
        convert(small, tmp_path / "whole", to="safetensors")


def test_converted_to_int8(small, tmp_path):
    pytest.importorskip("qwix")
    convert(small, tmp_path / "whole", to="safetensors", quantize="int8")
    report = LoadReport()
    target = load_target(tmp_path / "whole", report=report)
    assert "tensors stay int8 on the device" in str(report)
    stored = load_file(small / "model.safetensors")["model.layers.1.mlp.experts.gate_proj"]
    values = np.asarray(leaves(target)["layers.1.mlp.experts.gate_up.values"][...])[:, 0]
    # quantised a second time along the same rows, by another rule for the scale
    assert np.abs(values.astype(np.int32) - stored).max() <= 1


def test_a_difference_on_a_gguf_file_is_not_converted(tmp_path):
    weights = {name: 0.1 * weight for name, weight in llama_weights().items()}
    write_gguf(tmp_path / "base.gguf", gguf_entries(weights))
    theirs = open_checkpoint(tmp_path / "base.gguf").hf_config
    assert theirs is not None
    config = difference_config(theirs, "../base.gguf", dense_layers=1, experts=4, topk=2, width=FFN)
    write_difference(tmp_path / "moe", config, small_layers())
    with pytest.raises(CheckpointError, match="a difference on a GGUF file is not converted"):
        convert(tmp_path / "moe", tmp_path / "whole", to="safetensors")


def test_every_mesh_says_what_one_device_says(small):
    """Experts split whole or by width, heads over two devices; each device reads its own part of the rows."""
    prompt = [1, 5, 2, 8, 9, 4, 7]
    one = EagleJaxEngine.from_pretrained(str(small), max_len=64)
    base = EagleJaxEngine.from_pretrained(str(small.parent / "base"), max_len=64)
    want = one.score(prompt)
    assert np.abs(want.logits - base.score(prompt).logits).max() > 1e-2
    for split in ("experts", "width"):
        engine = EagleJaxEngine.from_pretrained(str(small), mesh="model=2", expert_split=split, max_len=64)
        got = engine.score(prompt)
        np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=5e-5)
        assert np.array_equal(got.experts[1], want.experts[1])
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    assert engine.generate(prompt, sampling)[0].token_ids == one.generate(prompt, sampling)[0].token_ids


def test_a_built_in_difference_by_name(small, monkeypatch):
    """Offered as soon as its folder is shipped, and with its draft where that is shipped too."""
    shipped = small.parent / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(builtin, "SHIPPED", shipped)
    asked = {"model": {"model": "smollm2-moe"}}
    label = lambda section, key: key
    assert "smollm2-moe" not in builtin.builtin_names()
    shutil.move(small, shipped / "smollm2-moe")
    edit(shipped / "smollm2-moe", eaglejax={"base": "../../base", "difference": "int8-rows"})
    assert "smollm2-moe" in builtin.builtin_names()
    assert load_target(resolve("smollm2-moe").path).config.family == "glm4_moe"
    assert RunConfig.from_tables(asked, label).draft is None
    planned = read_models("smollm2-moe", "auto")
    assert (planned.name, planned.draft, planned.storage) == ("smollm2-moe", None, None)
    assert planned.target == load_target(shipped / "smollm2-moe").config
    shutil.copytree(SHIPPED / "smollm2-eagle3", shipped / "smollm2-moe-eagle3")
    assert RunConfig.from_tables(asked, label).draft == "smollm2-moe-eagle3"
    with pytest.raises(ConfigError, match="no such config.*smollm2-moe"):
        read_models("smollm2-mo", "auto")
