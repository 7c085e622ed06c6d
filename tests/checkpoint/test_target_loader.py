"""Loading a target: what is listed, what is refused before anything is read, and forms of one model that must load
alike."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eaglejax.checkpoint.target_loader import load_target
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.layers import leaves

STORED = Path(__file__).parents[1] / "data" / "targets"


def changed(folder: Path, name: str, change=None, **config) -> Path:
    """A copy of a stored checkpoint: `change` may edit its tensors, `config` its config.json."""
    tensors = load_file(STORED / name / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
    values = json.loads((STORED / name / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def same(first, second) -> None:
    ours, theirs = leaves(first), leaves(second)
    assert ours.keys() == theirs.keys()
    for leaf, variable in ours.items():
        np.testing.assert_array_equal(variable[...], theirs[leaf][...], err_msg=leaf)


def reported(folder: Path) -> str:
    report = LoadReport()
    load_target(folder, report=report)
    return str(report)


def set_to(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def drop(name):
    return lambda tensors: tensors.pop(name)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "name, change, config, words",
    [
        ("llama_biased", drop(Q), {}, rf"'{Q}' is missing; found nothing; expected \[40, 32\]"),
        (
            "llama_biased",
            set_to(Q, np.ones((32, 40), np.float32)),
            {},
            r"q_proj.weight' has the wrong shape.*\[32, 40\].*\[40, 32\]",
        ),
        ("llama_biased", set_to(Q, np.ones((40, 32), np.int16)), {}, "q_proj.weight' has a dtype.*I16"),
        ("llama_biased", set_to(Q, np.ones((40, 32), ml_dtypes.float8_e4m3fn)), {}, "quantised.*no quant.*F8_E4M3"),
        ("llama_biased", None, dict(intermediate_size=41), r"gate_proj.weight' has the wrong shape.*more tensors"),
        ("llama_biased", None, dict(attention_bias=False), "no place.*proj.bias.*check the config"),
        ("llama_biased", None, dict(num_hidden_layers=1), r"no place.*layers\.1"),
        ("llama_biased", None, dict(num_hidden_layers=3), r"'model.layers.2.input_layernorm.weight' is missing"),
        (
            "llama_biased",
            None,
            dict(vocab_size=65),
            r"embed_tokens.weight' has the wrong shape.*\[64, 32\].*\[65, 32\]",
        ),
        ("llama_biased", drop("model.embed_tokens.weight"), {}, "embedding is missing"),
        ("llama_biased", drop("lm_head.weight"), {}, "'lm_head.weight' is missing"),
        (
            "llama_biased",
            set_to("model.layers.0.self_attn.q_norm.weight", np.ones(10, np.float32)),
            {},
            "no place.*q_norm",
        ),
        (
            "glm4_moe",
            drop("model.layers.2.mlp.experts.7.up_proj.weight"),
            {},
            r"experts\.7\.up_proj\.weight' is missing",
        ),
        ("glm4_moe", drop("model.layers.1.mlp.gate.e_score_correction_bias"), {}, "correction_bias' is missing"),
        (
            "glm4_moe",
            None,
            dict(n_routed_experts=4, num_experts_per_tok=2),
            r"gate\.weight' has the wrong shape.*\[8, 32\].*\[4, 32\]",
        ),
        ("gpt_oss", drop("model.layers.0.self_attn.sinks"), {}, "sinks' is missing"),
        ("gpt_oss", drop("model.layers.0.mlp.experts.down_proj_bias"), {}, "down_proj_bias' is missing"),
        ("deepseek_no_q_lora", None, dict(num_hidden_layers=1), r"no place.*layers\.1"),
        ("kimi_k25", set_to("audio_tower.weight", np.ones(2, np.float32)), {}, "no place.*audio_tower"),
    ],
)
def test_refused_from_the_headers(tmp_path, nothing_read, name, change, config, words):
    with pytest.raises(CheckpointError, match=words):
        load_target(changed(tmp_path, name, change, **config))


def test_refused_dtypes(nothing_read):
    with pytest.raises(ConfigError, match="float16.*float32 or bfloat16"):
        load_target(STORED / "llama_biased", dtype="float16")


def test_an_unknown_family_is_refused_before_the_weights_are_opened(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="mamba"):
        load_target(tmp_path)


def test_prediction_layers_are_skipped_and_listed(tmp_path):
    def with_prediction_layer(tensors):
        # a third layer beyond num_hidden_layers, as DeepSeek-V3 releases it: a decoder block and its projections
        block = {key.replace(".1.", ".2.", 1): value for key, value in tensors.items() if ".layers.1." in key}
        tensors |= block | {"model.layers.2.eh_proj.weight": np.ones((2, 4), np.float32)}

    folder = changed(tmp_path, "deepseek_no_q_lora", with_prediction_layer)
    text = reported(folder)
    assert "multi-token prediction: " in text and "(model.layers.2." in text
    same(load_target(folder), load_target(STORED / "deepseek_no_q_lora"))


def test_vision_tensors_are_skipped_and_listed():
    text = reported(STORED / "kimi_k25")
    assert "vision: 3 tensors" in text and "vision_tower" in text


def test_rotary_buffers_are_skipped_and_listed(tmp_path):
    buffer = set_to("model.layers.0.self_attn.rotary_emb.inv_freq", np.ones(5, np.float32))
    assert "computed here: 1 tensors" in reported(changed(tmp_path, "llama_biased", buffer))


def test_padded_vocabulary(tmp_path):
    """Rows beyond vocab_size are dropped from embedding and head alike, and said to be."""

    def pad(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.concatenate((tensors[name], np.full((8, 32), 1e6, np.float32)))

    folder = changed(tmp_path, "llama_biased", pad)
    same(load_target(folder), load_target(STORED / "llama_biased"))
    assert "lm_head.weight: 72 rows, those beyond vocab_size 64 dropped" in reported(folder)


def test_tied_with_a_copy(tmp_path):
    copy = lambda tensors: set_to("lm_head.weight", tensors["model.embed_tokens.weight"])(tensors)
    folder = changed(tmp_path, "llama_tied_linear", copy)
    assert "copy of the tied embedding" in reported(folder)
    same(load_target(folder), load_target(STORED / "llama_tied_linear"))


def test_tied_with_another_head(tmp_path):
    other = lambda tensors: set_to("lm_head.weight", tensors["model.embed_tokens.weight"] * 2)(tensors)
    with pytest.raises(CheckpointError, match="two different tensors.*tie_word_embeddings"):
        load_target(changed(tmp_path, "llama_tied_linear", other))


def test_mixtral_released_names_and_fused(tmp_path):
    """The same model with w1, w2, w3 of every expert, as Mixtral was released."""

    def release(tensors):
        for layer in range(2):
            block = f"model.layers.{layer}."
            tensors[f"{block}block_sparse_moe.gate.weight"] = tensors.pop(f"{block}mlp.gate.weight")
            gate_up = tensors.pop(f"{block}mlp.experts.gate_up_proj")
            down = tensors.pop(f"{block}mlp.experts.down_proj")
            for expert in range(5):
                name = f"{block}block_sparse_moe.experts.{expert}."
                tensors[f"{name}w1.weight"], tensors[f"{name}w3.weight"] = np.split(gate_up[expert], 2)
                tensors[f"{name}w2.weight"] = down[expert]

    same(load_target(changed(tmp_path, "mixtral_fused", release)), load_target(STORED / "mixtral_fused"))


@pytest.mark.parametrize("name", ["glm4_moe", "qwen2_moe"])
def test_fused_experts(tmp_path, name):
    def fuse(tensors):
        for layer in range(4):
            block, experts = f"model.layers.{layer}.mlp.experts.", range(8 if name == "glm4_moe" else 6)
            if f"{block}0.up_proj.weight" not in tensors:
                continue
            take = lambda part: np.stack([tensors.pop(f"{block}{e}.{part}_proj.weight") for e in experts])  # noqa: B023
            tensors[f"{block}gate_up_proj"] = np.concatenate((take("gate"), take("up")), axis=1)
            tensors[f"{block}down_proj"] = take("down")

    same(load_target(changed(tmp_path, name, fuse)), load_target(STORED / name))


def test_kimi_k25_as_transformers_writes_it(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            )
            new = new if new != name or name.startswith("model.") else f"model.{name}"
            tensors[new] = tensors.pop(name)

    same(load_target(changed(tmp_path, "kimi_k25", rename)), load_target(STORED / "kimi_k25"))


def test_kimi_k25_with_layers_called_blocks(tmp_path):
    """As save_pretrained of transformers 5.24 calls them."""

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("language_model.model.layers.", "language_model.model.blocks.")] = tensors.pop(name)

    same(load_target(changed(tmp_path, "kimi_k25", rename)), load_target(STORED / "kimi_k25"))


def test_a_bfloat16_checkpoint_is_widened_exactly():
    stored = load_file(STORED / "gpt_oss" / "model.safetensors")
    model = load_target(STORED / "gpt_oss")
    assert stored["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(model.embedding.weight[...], stored["model.embed_tokens.weight"].astype(np.float32))
    gate_up = stored["model.layers.0.mlp.experts.gate_up_proj"].astype(np.float32)
    np.testing.assert_array_equal(model.layers[0].mlp.experts.gate_up[3, 1, 5], gate_up[3, :, 11])


def test_float16_and_float64_checkpoints(tmp_path):
    def narrow(tensors):
        for index, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].astype(np.float16).astype(np.float64 if index % 2 else np.float16)

    model = load_target(changed(tmp_path, "llama_biased", narrow))
    for leaf, variable in leaves(model).items():
        assert variable[...].dtype == jnp.float32, leaf
    assert "F16, F64 in the file" in reported(tmp_path)


def test_no_leaf_stays_unset():
    for folder in sorted(path.parent for path in STORED.glob("*/expected.safetensors")):
        for leaf, variable in leaves(load_target(folder)).items():
            values = np.asarray(variable[...])
            assert np.isfinite(values).all() and values.any(), (folder.name, leaf)


def test_generation_config_wins(tmp_path):
    folder = changed(tmp_path, "llama_biased")
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 9]}')
    assert load_target(folder).config.eos_token_ids == (4, 9)


def test_assumptions_are_reported(tmp_path):
    text = reported(changed(tmp_path, "llama_tied_linear", rope_parameters=None, made_by="us"))
    assert "assumed: rope_theta is absent: 10000" in text and "not used: made_by" in text


def test_config_keys_in_doubt_are_a_warning(tmp_path, caplog):
    text = reported(changed(tmp_path, "llama_biased", dim_model_base=256))
    assert text.startswith("! config keys of the target that EagleJax does not know") and "dim_model_base = 256" in text
    assert "dim_model_base = 256" in caplog.text
