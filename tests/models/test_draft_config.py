"""What a draft's config says, against its tensors and target: shapes, captures, flags, other drafts, RoPE, windows."""

import kit_m
import numpy as np
import pytest
from draft_files import CUT, KIT, TOKENS, Q, draft, features, inspect, loaded, probabilities, proposes, refused

from eaglejax.models.capture import IDS_KEY
from eaglejax.models.draft_config import TargetFacts

# 07: shapes


def test_target_hidden_size(tmp_path):
    assert inspect(draft(tmp_path, target_hidden_size=128))[0].config.target_hidden_size == 128
    assert inspect(draft(tmp_path, target_hidden_size=None))[0].config.target_hidden_size == 128
    refused(draft(tmp_path, target_hidden_size=64), r"target_hidden_size: .*found 64; expected 128")
    refused(draft(tmp_path), r"384 columns of fc.weight; expected a multiple of 100", facts=TargetFacts(64, 100, 8))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"head_dim": 32}, r"q_proj.weight: .*128 rows; expected 256 \(num_attention_heads 8 x head_dim 32\)"),
        ({"num_attention_heads": 4}, r"q_proj.weight|k_proj.weight: .*rows"),
        ({"num_key_value_heads": 8}, r"k_proj.weight: .*64 rows; expected 128 \(num_key_value_heads 8"),
        ({"num_key_value_heads": 3}, "heads do not divide"),
        ({"num_attention_heads": None}, "num_attention_heads: must be a whole number above 0"),
        ({"hidden_size": 96}, r"hidden_size: .*found 96; expected 128"),
        ({"intermediate_size": 48}, r"gate_proj.weight: .*32 rows; expected 48"),
        ({"hidden_act": "mystery"}, "hidden_act: unknown activation; found 'mystery'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: must be a number above 0"),
        ({"fc": False}, r"fc: contradicts the tensors"),
    ],
)
def test_shapes_against_the_config(tmp_path, config, message):
    refused(draft(tmp_path, **config), message)


def test_head_dim_that_is_given_wins(tmp_path):
    """4 heads of 32 on a width of 96 (128 in all), a target of 128."""
    draw = lambda *shape: np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32)
    shapes = {"fc.weight": (96, 384), "lm_head.weight": (64, 96), "embed_tokens.weight": (64, 96), "norm.weight": (96,)}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (96,)
    for name, shape in (("q", (128, 192)), ("k", (64, 192)), ("v", (64, 192)), ("o", (96, 128))):
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = shape
    for name, shape in (("gate", (32, 96)), ("up", (32, 96)), ("down", (96, 32))):
        shapes[f"midlayer.mlp.{name}_proj.weight"] = shape
    sizes = dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    folder = draft(tmp_path, {k: draw(*v) for k, v in shapes.items()}, target_hidden_size=128, **sizes)
    module, report = loaded(folder, embedding=None)
    assert module.config.layers[0].attention.head_dim == 32 and "fc [96, 3 x 128]" in report
    assert np.isfinite(probabilities(module)).all()


def test_layer_count_from_tensors(tmp_path):
    plan, report = inspect(draft(tmp_path, num_hidden_layers=36))
    assert len(plan.config.layers) == 1 and "num_hidden_layers 36 in the config is a stale copy" in report


# 08: captures


def test_captures_in_the_report(tmp_path):
    plan, report = inspect(draft(tmp_path))
    assert plan.config.boundaries == (2, 4, 5) and "assumed the default 2, L//2, L-3 = [2, 4, 5]" in report
    folder = draft(tmp_path, name="nested", eagle_config={IDS_KEY: [1, 3, 4], "use_aux_hidden_state": True})
    assert inspect(folder)[0].capture.boundaries == (2, 4, 5)
    folder = draft(tmp_path, name="unclear", eagle_config={IDS_KEY: [2, 4, 5]})
    plan, report = inspect(folder)
    assert plan.capture.ambiguous and "! AMBIGUOUS" in report and "[3, 5, 6]" in report and "[2, 4, 5]" in report
    assert inspect(folder, capture="input")[0].config.boundaries == (2, 4, 5)
    for layers in (2, 3, 4, 6):
        refused(draft(tmp_path), f"L = {layers} blocks", facts=TargetFacts(64, 128, layers))
    refused(draft(tmp_path, name="far", **{IDS_KEY: [2, 4, 99]}), "99")
    refused(draft(tmp_path, name="both", eagle_config={IDS_KEY: [1, 3, 5]}, **{IDS_KEY: [2, 4, 5]}), "contradict")


def test_manifest(tmp_path):
    settings = {"eaglejax": {"boundaries": [2, 4, 8], "score_temperature": [1.5, 2]}}
    plan, report = inspect(draft(tmp_path, **settings))
    assert plan.config.boundaries == (2, 4, 8) and plan.score_temperature == (1.5, 2.0) and "manifest" in report
    refused(draft(tmp_path, eaglejax={"score_temperature": [0]}), "score_temperature: must be numbers above 0")


# 10: newer drafts


def test_four_captures_and_the_last_boundary(tmp_path):
    tensors = kit_m.draft_tensors(Q, (2, 4, 5, 8))
    module, _ = loaded(draft(tmp_path, tensors, target_hidden_size=128, **{IDS_KEY: [2, 4, 5, 8]}))
    assert module.config.boundaries == (2, 4, 5, 8)
    np.testing.assert_allclose(probabilities(module, features((2, 4, 5, 8))), Q[TOKENS], atol=5e-5)
    assert np.abs(probabilities(module, features((2, 4, 5, 7))) - Q[TOKENS]).max(-1).min() > 0.02


def test_capture_norms(tmp_path):
    """Norms of 2.0 on every capture: fc sees 2 x / rms(x), which an fc made for it undoes."""
    scales = [2 / np.sqrt((1 + b) / 128 + 1e-5) for b in (2, 4, 5)]
    fc = np.concatenate([part / s for part, s in zip(np.split(KIT["fc.weight"], 3, -1), scales, strict=True)], -1)
    norms = {f"fc_norm.{i}.weight": np.full(128, 2, np.float32) for i in range(3)}
    module, report = loaded(draft(tmp_path, {"fc.weight": fc.astype(np.float32)} | norms, fc_norm=True))
    np.testing.assert_allclose(probabilities(module), Q[TOKENS], atol=5e-4)
    assert "fc_norm" in report
    old = {f"aux_norm_{n}.weight": np.full(128, 2, np.float32) for n in ("low", "mid", "high")}
    module, _ = loaded(draft(tmp_path, {"fc.weight": fc.astype(np.float32)} | old, name="old", use_aux_norm=True))
    np.testing.assert_allclose(probabilities(module), Q[TOKENS], atol=5e-4)
    refused(draft(tmp_path, norms, name="unsaid"), "fc_norm.0.weight is in the file, but the config does not say")
    refused(draft(tmp_path, name="none", fc_norm=True), "fc_norm is true, but a tensor is missing")
    _, report = proposes(draft(tmp_path, norms, name="off", fc_norm=False))
    assert "switched off by fc_norm" in report
    joint = norms | {"input_norm.weight": np.ones(384, np.float32)}
    refused(draft(tmp_path, joint, name="both", fc_norm=True, norm_before_fc=True), "exclude each other")


def test_flags_reach_the_network(tmp_path):
    for flag in ("norm_before_residual", "norm_output"):
        plan, report = inspect(draft(tmp_path, name=flag, **{flag: True}))
        assert getattr(plan.config, flag) and f"flags: {flag}" in report
        assert not getattr(inspect(draft(tmp_path))[0].config, flag)
        refused(draft(tmp_path, name="word", **{flag: "yes"}), f"{flag}: a flag must be true or false")
    refused(draft(tmp_path, norm_output=True, eagle_config={"norm_output": False}), "norm_output: a flag is set twice")
    refused(draft(tmp_path, eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm")
    overridden, report = inspect(draft(tmp_path, norm_output=True), overrides={"norm_output": False})
    assert not overridden.config.norm_output and "overridden: norm_output = False" in report


def test_unknown_keys(tmp_path):
    refused(draft(tmp_path, {"fancy_norm.weight": np.ones(128, np.float32)}, fancy_norm=True), "fancy_norm")
    for key, value in [
        ("fancy_norm", True),
        ("norm_twice", 1),
        ("use_magic", True),
        ("residual_multiplier", 0.5),
        ("logit_scale", 2.0),
        ("final_logit_softcapping", 30.0),
        ("attention_chunk", 8),
        ("parallel_draft_step", 2),
    ]:
        refused(draft(tmp_path, **{key: value}), rf"config.json: {key}: an unknown key could change")
    quiet = {"note_to_self": "hello", "fancy_norm": False, "residual_multiplier": 1.0, "final_logit_softcapping": None}
    _, report = inspect(draft(tmp_path, **quiet))
    line = next(line for line in report.splitlines() if "unknown config keys" in line)
    assert all(key in line for key in quiet)
    refused(draft(tmp_path, eagle_config={"extra_norm": True}), "eagle_config.extra_norm")
    assert "unknown config keys" not in inspect(draft(tmp_path, num_experts=8, routed_scaling_factor=2.5))[1]


# 11: other things than an EAGLE-3 draft


def test_other_things(tmp_path):
    target = kit_m.write_target(tmp_path / "target", Q, tokenizer=False)
    refused(target, "complete language model of 8 layers, not a draft")
    eagle1 = {"fc.weight": np.zeros((128, 256), np.float32)}
    old = ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight", "lm_head.weight")
    refused(draft(tmp_path, eagle1, old), "EAGLE-1/2 draft")
    refused(draft(tmp_path, {"fc.weight": np.zeros((128, 128), np.float32)}), "default has three.*1 captures")
    refused(draft(tmp_path, {"fc.weight": np.zeros((128, 256), np.float32)}), "default has three.*2 captures")
    for architecture in ("BertModel", "T5ForConditionalGeneration", "MixtralForCausalLM"):
        refused(
            draft(tmp_path, architectures=[architecture]), f"architectures: .*no EAGLE-3 draft; found {architecture}"
        )
    for config, words in [
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        ({"ptd_token_id": 5}, "P-EAGLE"),
        ({"parallel_drafting": True}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, "EAGLE-4"),
        ({"efficient_lm_head_config": {"type": "low_rank"}}, "EAGLE-4"),
        ({"architectures": ["DeepSeekMTPModel"]}, "multi-token-prediction"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["MedusaModel"]}, "Medusa"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type: .*'eagle'"),
    ]:
        refused(draft(tmp_path, **config), words)
    refused(draft(tmp_path, {"mask_hidden": np.zeros((1, 384), np.float32)}), "P-EAGLE.*mask_hidden")
    refused(draft(tmp_path, {"model.layers.61.eh_proj.weight": np.zeros((2, 2), np.float32)}), "multi-token-prediction")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    refused(nothing, "nothing")


def test_null_marks_of_other_drafts_are_harmless(tmp_path):
    inspect(draft(tmp_path, mask_token_id=None, parallel_drafting=False, num_nextn_predict_layers=1))


# 12: RoPE


def rope_of(folder, **kw):
    plan, report = inspect(folder, **kw)
    return plan.config.layers[0].attention.rope, report


def test_rope_of_the_draft_alone(tmp_path):
    rope, report = rope_of(draft(tmp_path))
    assert rope.theta == 10000 and rope.kind == "default" and "not the target's" in report
    places = [
        {"rope_theta": 5e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
        {"rope_theta": 5e6, "rope_parameters": {"rope_theta": 5e6}},
        {"rope_theta": 5e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    ]
    found = [rope_of(draft(tmp_path, name=str(i), **place)) for i, place in enumerate(places)]
    assert all(rope == found[0][0] and rope.theta == 5e6 and "theta 5e+06" in report for rope, report in found)
    old = {"rope_theta": 5e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
    new = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e6,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    }
    first, second = (rope_of(draft(tmp_path, name=n, **x)) for n, x in (("old", old), ("new", new)))
    assert (
        first[0] == second[0] and first[0].kind == "yarn" and "yarn scaling, factor 4, original context 512" in first[1]
    )
    rope, report = rope_of(draft(tmp_path, name="told", rope_theta=1e6), overrides={"rope_theta": 10000.0})
    assert rope.theta == 10000 and "overridden: rope_theta = 10000.0" in report
    refused(draft(tmp_path, rope_scaling={"rope_type": "longrope", "factor": 2.0}), "longrope")
    refused(draft(tmp_path, rope_scaling={"rope_type": "mystery"}), "mystery")
    refused(draft(tmp_path, rope_theta=1e6, rope_parameters={"rope_theta": 5e6}), "rope")


def test_window_keys(tmp_path):
    window = lambda **config: inspect(draft(tmp_path, **config))[0].config.layers[0].attention.window
    assert window(sliding_window=None) is None
    assert window(sliding_window=2048) == 2048
    assert window(sliding_window=2048, use_sliding_window=False) is None
    assert window(sliding_window=2048, layer_types=["sliding_attention"]) == 2048
    assert window(sliding_window=2048, layer_types=["full_attention"]) is None
    assert window(sliding_window=2048, use_sliding_window=True, max_window_layers=1) is None
    refused(draft(tmp_path, layer_types=["chunked_attention"]), "layer_types: .*chunked_attention")
    refused(draft(tmp_path, layer_types=["sliding_attention"]), "sliding_window None")
    refused(draft(tmp_path, sliding_window=0), "sliding_window: must be a whole number above 0")


def test_copied_sizes_are_overruled(tmp_path):
    """vocab_size and max_position_embeddings of a config are often another model's."""
    plan, report = inspect(draft(tmp_path, ids=CUT, vocab_size=99, max_position_embeddings=16))
    assert plan.config.vocab_size == 64 and "vocab_size 99 in the config is not used" in report
    assert "max_position_embeddings 16 sets no limit" in report
