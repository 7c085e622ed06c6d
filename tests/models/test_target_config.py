"""Released configs: what is read, what is assumed and said, and what is refused by name."""

import json
from pathlib import Path

import pytest

from eaglejax.errors import ConfigError
from eaglejax.models.config import DenseConfig, GQAConfig, MLAConfig, MoEConfig
from eaglejax.models.families import FAMILIES
from eaglejax.models.target_config import find_family, read_target_config

STORED = Path(__file__).parents[1] / "data" / "targets"


def stored(name: str, **changes) -> dict:
    """A stored config with some keys changed, and those given as None removed."""
    values = json.loads((STORED / name / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value is not None or key not in changes}


def read(name: str, **changes):
    return read_target_config(stored(name, **changes))


def test_every_family_is_named_once():
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    assert {
        "llama", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe", "gpt_oss"
    } <= set(types)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_dispatch(family):
    both = dict(model_type=family.model_types[0], architectures=[family.architectures[0]])
    assert find_family(both, "config.json") is family
    assert find_family(dict(model_type=family.model_types[0]), "config.json") is family
    assert (
        family.architectures[0] in find_family(dict(architectures=both["architectures"]), "config.json").architectures
    )


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(model_type="mamba", architectures=["MambaForCausalLM"]), "mamba.*kimi_k2.*gpt_oss"),
        (dict(), "does not know.*None.*llama"),
        (
            dict(model_type="llama", architectures=["LlamaForSequenceClassification"]),
            "different models.*LlamaForCausalLM",
        ),
        (dict(model_type="llama", architectures=["LlamaForCausalLMEagle3"]), "draft, not a target"),
        (dict(model_type="qwen3_moe", architectures=["MixtralForCausalLM"]), "different models"),
        (dict(architectures=["Something"]), "does not know"),
    ],
)
def test_unknown_families(values, words):
    with pytest.raises(ConfigError, match=words):
        find_family(values, "config.json")


def test_sparse_layers():
    kinds = lambda reading: [isinstance(layer.mlp, MoEConfig) for layer in reading.config.layers]
    assert kinds(read("qwen2_moe")) == [True, True, False, True]
    assert kinds(read("qwen3_moe_sparse_step")) == [False, True, False, True]
    assert kinds(read("qwen3_moe_sparse_step", mlp_only_layers=[1])) == [False, False, False, True]
    assert kinds(read("glm4_moe")) == [False, True, True]
    assert kinds(read("deepseek_dense")) == [False, False]
    assert kinds(read("deepseek_v3_config", moe_layer_freq=2)) == [False, False, True, False]
    assert kinds(read("deepseek_v3_config", moe_layer_freq=[0, 1, 0, 1])) == [False, True, False, True]
    assert kinds(read("gpt_oss")) == [True] * 3
    assert kinds(read("qwen3_moe_sparse_step", num_local_experts=None, num_experts=0)) == [False] * 4


def test_windows():
    windows = lambda reading: [layer.attention.window for layer in reading.config.layers]
    assert windows(read("gpt_oss")) == [4, None, 4]
    assert windows(read("gpt_oss", layer_types=None)) == [4, None, 4]
    assert "layer_types" in " ".join(read("gpt_oss", layer_types=None).assumed)
    assert windows(read("mistral_window")) == [5, 5]
    assert windows(read("mistral_window", sliding_window=None)) == [4096, 4096]  # absent: the family's own default
    assert windows(read_target_config(stored("mistral_window") | dict(sliding_window=None))) == [None, None]
    assert windows(read("mixtral_fused")) == [6, 6]
    assert windows(read("llama_biased", layer_types=["full_attention"] * 2)) == [None, None]
    assert windows(read("mixtral_fused", sliding_window=None)) == [None, None]
    assert windows(read("qwen2_window")) == [None, 4, 4]
    assert windows(read("qwen2_window", layer_types=None)) == [None, 4, 4]
    assert windows(read("qwen3_moe_sparse_step", use_sliding_window=True, sliding_window=9)) == [9] * 4
    types = ["sliding_attention", "full_attention"] * 2
    used = read("qwen2_moe", use_sliding_window=True, sliding_window=7, layer_types=types)
    assert windows(used) == [7, None, 7, None]


def test_attention_of_each_kind():
    glm = read("glm4_moe").config.layers[0].attention
    assert isinstance(glm, GQAConfig) and glm.qkv_bias and not glm.output_bias and glm.qk_norm
    assert (glm.head_dim, glm.rope.rotary_dim) == (12, 6)
    assert read("glm4_moe", rope_parameters=None, rope_theta=1e4).config.layers[0].attention.rope.rotary_dim == 6
    latent = read("deepseek_no_q_lora").config.layers[0].attention
    assert isinstance(latent, MLAConfig) and latent.q_lora_rank is None and latent.bias and latent.rope.interleaved
    dense = read("deepseek_dense").config.layers[0].attention
    assert isinstance(dense, MLAConfig) and not dense.rope.interleaved
    # no head_dim: the hidden size over the heads
    assert read("llama_tied_linear", head_dim=None).config.layers[0].attention.head_dim == 8


def test_kimi_names_and_nesting():
    reading = read("kimi_k25")
    moe = reading.config.layers[1].mlp
    assert isinstance(moe, MoEConfig) and (moe.experts, moe.groups, moe.scaling) == (10, 1, 2.827)
    assert isinstance(reading.config.layers[0].mlp, DenseConfig)
    assert not reading.config.tie_embeddings
    # the wrapper has the last word on tied embeddings
    assert read("kimi_k25", tie_word_embeddings=True).config.tie_embeddings


def test_end_of_text():
    assert read("llama_biased").config.eos_token_ids == (1,)
    assert read("llama_biased", eos_token_id=[2, 5]).config.eos_token_ids == (2, 5)
    config = read_target_config(stored("llama_biased"), generation=dict(eos_token_id=[7, 9], bos_token_id=3)).config
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 9), 3)
    assert read("llama_biased", eos_token_id=None).config.eos_token_ids == ()


def test_what_is_assumed_is_said():
    reading = read("llama_tied_linear", rope_parameters=None)
    assert any("rope_theta" in line and "10000" in line for line in reading.assumed)
    assert reading.config.layers[0].attention.rope.theta == 10000.0
    assert not read("llama_tied_linear").assumed


def test_harmless_unknown_keys_are_listed():
    reading = read("llama_biased", made_by="someone", use_magic=False, residual_multiplier=1.0)
    assert set(reading.unread) == {"made_by", "use_magic", "residual_multiplier"}


# keys met in released configs beside those of their family's reference, none with an effect there
RELEASED = [
    ("llama_biased", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    ("llama_biased", dict(unsloth_version="2025.12.5", unsloth_fixed=True, max_sequence_length=2048)),
    ("llama_biased", dict(rope_scaling_factor=1.0, rope_scaling_type=None, alibi=False, paddlenlp_version=None)),
    ("llama_biased", dict(use_fused_rope=True, use_flash_attention=True, fuse_attention_qkv=True, use_recompute=False)),
    ("llama_biased", dict(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1, virtual_pp_degree=1)),
    ("llama_biased", dict(use_sdpa=True, is_causal=True, _flash_attn_2_enabled=True)),
    ("qwen2_window", dict(use_mrope=False)),
    ("qwen3_moe_sparse_step", dict(head_dim=16, use_sliding_window=False, max_window_layers=48)),
    ("mixtral_fused", dict(attention_bias=False, pretraining_tp=1, world_size=8)),
    ("deepseek_v3_config", dict(ep_size=1, num_nextn_predict_layers=1, head_dim=64, qk_head_dim=24, aux_loss_alpha=0.001)),
    ("gpt_oss", dict(initial_context_length=4096, experts_per_token=2, output_router_logits=False)),
    ("glm4_moe", dict(num_nextn_predict_layers=1, use_cache=True)),
]  # fmt: skip


@pytest.mark.parametrize("name, more", RELEASED)
def test_keys_of_released_configs(name, more):
    values = stored(name)
    reading = read_target_config(more | values)
    assert reading.config == read_target_config(values).config and not reading.doubtful


def test_unknown_keys_in_doubt_are_told_with_their_value():
    reading = read("llama_biased", dim_model_base=256, depth_factor=1.0, made_by="someone")
    assert reading.doubtful == ("dim_model_base = 256",)
    assert set(reading.unread) == {"depth_factor", "made_by"}


def test_keys_beside_the_text_part():
    """Those of the other parts are theirs; one that could be the text model's is told."""
    theirs = dict(
        use_unified_vision_chunk=True, media_placeholder_token_id=5, video_placeholder="<v>", ignore_index=-100,
        vision_config=dict(hidden_size=8), mm_hidden_size=8, image_scale=2.0,
    )  # fmt: skip
    assert not read("kimi_k25", **theirs).doubtful
    mirrored = stored("kimi_k25")["text_config"]["hidden_size"]
    assert read("kimi_k25", logit_scale=0.5, hidden_size=mirrored).doubtful == ("logit_scale = 0.5",)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("llama_biased", dict(is_causal=False), "is_causal.*False.*True"),
        ("llama_biased", dict(final_logit_cap=30.0), "final_logit_cap.*30.0.*remove it"),
        ("llama_biased", dict(ffn_act="relu2"), "ffn_act"),
        ("llama_biased", dict(qk_clip=100), "qk_clip"),
        ("llama_biased", dict(num_loops=4), "num_loops.*4"),
        ("llama_biased", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        ("llama_biased", dict(residual_multiplier=0.2), "residual_multiplier"),
        ("llama_biased", dict(use_fancy_path=True), "use_fancy_path"),
        ("llama_biased", dict(rope_interleaved=True), "rope_interleaved"),
        ("llama_biased", dict(no_rope_layers=[1, 0]), "no_rope_layers"),
        ("llama_biased", dict(sliding_window=8), "sliding_window"),
        ("llama_biased", dict(hidden_act="tanh"), "hidden_act.*'tanh'.*silu"),
        ("mixtral_fused", dict(hidden_act="gelu"), "hidden_act.*'gelu'"),
        ("llama_biased", dict(partial_rotary_factor=0.8), "partial_rotary_factor"),
        ("llama_biased", dict(num_key_value_heads=3), "heads"),
        ("llama_biased", dict(hidden_size="64"), "hidden_size.*'64'.*int"),
        ("llama_biased", dict(num_hidden_layers=0), "num_hidden_layers.*0"),
        ("llama_biased", dict(rms_norm_eps=None), "rms_norm_eps.*missing"),
        ("llama_biased", dict(vocab_size=True), "vocab_size"),
        ("llama_biased", dict(eos_token_id="</s>"), "eos_token_id"),
        ("llama_tied_linear", dict(head_dim=None, hidden_size=30), "head_dim.*missing"),
        ("qwen3_yarn", dict(head_dim=None), "head_dim.*missing"),
        ("deepseek_v3_config", dict(scoring_func="softmax"), "scoring_func.*'softmax'.*sigmoid"),
        ("deepseek_v3_config", dict(topk_method="greedy"), "topk_method.*'greedy'.*noaux_tc"),
        ("deepseek_v3_config", dict(n_group=3), "8 experts in 3 groups"),
        ("deepseek_v3_config", dict(topk_group=3), "3 groups"),
        ("deepseek_v3_config", dict(num_experts_per_tok=5), "5 experts chosen"),
        ("deepseek_v3_config", dict(n_group=8), "8 experts in 8 groups"),
        ("deepseek_v3_config", dict(norm_topk_prob=None), "norm_topk_prob.*missing"),
        ("deepseek_v3_config", dict(routed_scaling_factor="x"), "routed_scaling_factor"),
        ("deepseek_v3_config", dict(q_lora_rank=None), "q_lora_rank.*missing"),
        ("deepseek_v3_config", dict(index_topk=2048), "index_topk"),
        ("gpt_oss", dict(swiglu_limit=5.0), "swiglu_limit.*5.0.*7.0"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window"),
        ("gpt_oss", dict(layer_types=["full_attention", "chunked_attention", "full_attention"]), "layer_types"),
        ("gpt_oss", dict(layer_types=["full_attention"]), "layer_types"),
        ("gpt_oss", dict(experts_per_token=3), "contradict"),
        ("qwen2_moe", dict(use_sliding_window=True, layer_types=None), "use_sliding_window"),
        ("qwen3_moe_sparse_step", dict(layer_types=["sliding_attention"] * 4), "sliding"),
        ("qwen3_moe_sparse_step", dict(use_qk_norm=False), "use_qk_norm"),
        ("qwen3_moe_sparse_step", dict(shared_expert_intermediate_size=16), "shared_expert_intermediate_size"),
        ("llama_biased", dict(layer_types=["sliding_attention"] * 2), "layer_types"),
        ("kimi_k25", dict(text_config=None), "text_config.*missing"),
    ],
)
def test_refused_by_name(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        read(name, **changes)
