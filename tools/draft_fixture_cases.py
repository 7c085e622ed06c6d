"""The released draft formats at tiny sizes; used by make_draft_fixtures.py."""

from __future__ import annotations

from typing import Any

import draft_fixture_faults as f
from make_draft_fixtures import Case, V, embedding, ends, gqa_layer, linear, mla_layer, norm, vocabulary

IDS = "eagle_aux_hidden_state_layer_ids"
HIGH, MEDIUM, LOW = "high", "medium", "low"


def llama(**changes: Any) -> dict[str, Any]:
    """A plain draft config of the SafeAILab / SpecForge kind."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 16,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.53.1",
        "use_cache": True,
        "vocab_size": V,
        "draft_vocab_size": 48,
    } | changes


def speculators(layer: dict[str, Any], target: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 48,
        "dtype": "float32",
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": [target], "name_or_path": "tiny/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    } | changes


def simple(config: dict[str, Any], prefix: str = "midlayer.", inputs: int | None = 96, draft_size: int | None = 48):
    """Builder of a one-layer draft with maps and without an embedding."""

    def build(rng):
        out = ends(rng, config["hidden_size"], inputs, draft_size) | gqa_layer(rng, prefix, config)
        return out | (vocabulary(rng, draft_size) if draft_size else {})

    return build


def speculators_llama() -> Case:
    layer = llama(head_dim=8, attention_bias=False, mlp_bias=False, rope_theta=500000.0, rope_scaling=None)
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 4, "architectures": ["LlamaForCausalLM"]}
    del layer["draft_vocab_size"]
    config = speculators(layer, "LlamaForCausalLM", norm_before_residual=True)
    config["architectures"] = ["Eagle3Speculator"]
    silent = {k: v for k, v in config.items() if k != "norm_before_residual"}

    def build(rng):
        own = {"embed_tokens.weight": embedding(rng, 32)}
        return simple(layer, "layers.0.")(rng) | own

    planted = f.COMMON | f.MAPPED | {"captures reversed": f.captures_reversed(3), "window ignored": f.window(None)}
    planted |= {"window one too wide": f.window(5), "window one too narrow": f.window(3)}
    planted |= {"rope base 10000": f.rope_base(10000.0)}
    notes = {
        "special": "norm_before_residual true; sliding window of 4: row i sees rows i-3..i, in the prefill and in the "
        "chain; embed_tokens saved; aux ids absent, so the boundaries are the default ones of the consumer",
        "sure": HIGH,
        "other_configs": "config_silent.json lacks norm_before_residual, which vLLM takes as true for this format",
    }
    return Case("speculators_llama", config, build, planted, notes, other_configs={"config_silent.json": silent})


def speculators_qwen3() -> Case:
    layer = llama(architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=2, head_dim=12)
    layer |= {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": False, "sliding_window": None}
    layer |= {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "use_sliding_window": False}
    layer |= {"layer_types": ["full_attention"] * 2, "max_window_layers": 2, "rms_norm_eps": 1e-06}
    del layer["draft_vocab_size"]
    config = speculators(layer, "Qwen3MoeForCausalLM", norm_before_residual=False, norm_before_fc=True)
    config[IDS] = [2, 4, 5]

    def build(rng):
        out = ends(rng, 32, 96, 48) | {"input_norm.weight": norm(rng, 96), "embed_tokens.weight": embedding(rng, 32)}
        for i in range(2):
            out |= gqa_layer(rng, f"layers.{i}.", layer, qk_norm=True)
        return out | vocabulary(rng, 48)

    planted = f.COMMON | f.MAPPED | {"captures reversed": f.captures_reversed(3), "rope base 10000": f.rope_base(1e4)}
    planted |= {
        "q_norm skipped": f.without_tensors("self_attn.q_norm"),
        "k_norm skipped": f.without_tensors("self_attn.k_norm"),
        "input_norm skipped": f.without("input_norm"),
        "input_norm for each capture": f.norm_each(3),
        "second layer skipped": f.first_layer_only,
    }
    notes = {
        "special": "Qwen3 layers with q_norm and k_norm; 2 heads of 12 (24) differ from hidden_size 32; "
        "norm_before_fc: one "
        "norm over the joined captures; layers.1 is an ordinary layer on the residual stream; rope_parameters layout",
        "sure": HIGH,
        "aux": {"target_layers": 8, "stored": [2, 4, 5], "boundaries": [2, 4, 5]},
    }
    return Case("speculators_qwen3", config, build, planted, notes)


def specforge_eagle31() -> Case:
    config = llama(head_dim=8, rope_theta=1000000.0, rope_scaling=None, attention_bias=False, rms_norm_eps=1e-06)
    config |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "mlp_bias": False}
    config |= {"fc_norm": True, "norm_output": True, "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}}

    def build(rng):
        return simple(config)(rng) | {f"fc_norm.{i}.weight": norm(rng, 32) for i in range(3)}

    planted = f.COMMON | f.MAPPED | {"captures reversed": f.captures_reversed(3), "rope base 10000": f.rope_base(1e4)}
    planted["norm_output ignored"] = planted.pop("norm_output flipped")
    planted |= {"fc_norm skipped": f.without("fc_norms"), "fc_norm over the joined captures": f.norm_all_at_once}
    notes = {
        "special": "one norm for each capture before fc; the hidden state fed back is the one after the final norm",
        "sure": HIGH,
        "aux": {"target_layers": 8, "stored": [1, 3, 4], "boundaries": [2, 4, 5]},
    }
    return Case("specforge_eagle31", config, build, planted, notes, borrows_embed=True)


def two_layouts(config: dict[str, Any], base: float, scaling: dict[str, Any], new_first: bool):
    """(config, other configs): the same rotary settings in the older and in the newer layout."""
    old = config | {"rope_theta": base, "rope_scaling": scaling}
    named = {("rope_type" if k == "type" else k): v for k, v in scaling.items()}
    new = config | {"rope_parameters": named | {"rope_theta": base}}
    return (new, {"config_old_layout.json": old}) if new_first else (old, {"config_new_layout.json": new})


def specforge_yarn() -> Case:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    plain = llama(head_dim=16, max_position_embeddings=128)
    config, others = two_layouts(plain, 10000.0, scaling, new_first=False)
    planted = {
        "scaling ignored": f.rope_base(10000.0),
        "frequencies not scaled": f.rope_frequencies(10000.0),
        "cos and sin not scaled": f.rope_unscaled,
        "chain positions one late": f.position_gap,
    }
    notes = {
        "special": "yarn on a Llama draft: cos and sin are multiplied by 0.1 ln(factor) + 1, the softmax scale is not "
        "touched; 40 rows, the original length is 32",
        "sure": HIGH,
        "remark": "SpecForge itself builds yarn with base 10000 whatever rope_theta says, hence rope_theta is 10000 "
        "here",
    }
    return Case(
        "specforge_yarn", config, simple(config), planted, notes, n=40, borrows_embed=True, other_configs=others
    )


def specforge_llama3() -> Case:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 40}
    plain = llama(head_dim=16, max_position_embeddings=320)
    config, others = two_layouts(plain, 500000.0, scaling, new_first=True)
    planted = {
        "scaling ignored": f.rope_base(500000.0),
        "rope default": f.rope_base(10000.0),
        "chain positions one late": f.position_gap,
    }
    notes = {
        "special": "llama3 scaling with frequencies kept, interpolated and divided; 44 rows, the original length is "
        "40; "
        "config.json has the newer layout",
        "sure": HIGH,
    }
    return Case(
        "specforge_llama3", config, simple(config), planted, notes, n=44, borrows_embed=True, other_configs=others
    )


def modelopt_config(aux: bool, ids: list[int], last_norm: bool = True, hidden_norm: bool = True) -> dict[str, Any]:
    config = llama(head_dim=8, rope_theta=10000.0, rope_scaling=None, attention_bias=False, attention_dropout=0.0)
    config |= {"mlp_bias": False, "pretraining_tp": 1, "max_position_embeddings": 4096}
    config["eagle_config"] = {
        IDS: ids,
        "use_aux_hidden_state": aux,
        "use_input_layernorm_in_first_layer": hidden_norm,
        "use_last_layernorm": last_norm,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return config


def modelopt_shared_head() -> Case:
    config = modelopt_config(True, [4, 6, 8]) | {"draft_vocab_size": None}
    planted = f.COMMON | {
        "captures reversed": f.captures_reversed(3),
        "use_last_layernorm ignored": f.without("norm"),
        "use_input_layernorm_in_first_layer ignored": f.without_tensors("hidden_norm"),
    }
    notes = {
        "special": "no lm_head in the file: the head is the target's (target_head.safetensors), draft_vocab_size "
        "null, no "
        "maps. use_last_layernorm: there is a norm before the head. use_input_layernorm_in_first_layer: the hidden "
        "half "
        "of the attention input has its norm (stored as hidden_norm; the norm of the embedding half, "
        "input_layernorm, is "
        "there in any case). The hidden state fed back is the one before the norm",
        "sure": "high for the numbers, medium for the numbering of the captures",
        "aux": {"target_layers": 8, "stored": [4, 6, 8], "boundaries": [4, 6, 8]},
        "remark": "ModelOpt itself counts outputs of layers (boundary = id + 1); ids that reach the number of layers "
        "can "
        "only be boundaries, and boundary 8 of 8 is the residual stream after the last layer, before the final norm",
    }
    build = simple(config, draft_size=None)
    return Case("modelopt_shared_head", config, build, planted, notes, borrows_embed=True, borrows_head=True)


def modelopt_no_aux(with_fc: bool) -> Case:
    config = modelopt_config(False, [])
    build = simple(config, "midlayer." if with_fc else "layers.0.", inputs=32 if with_fc else None)
    planted = f.COMMON | f.MAPPED
    if with_fc:
        planted = planted | {"fc skipped since the widths agree": f.without("fc")}
    else:
        planted = planted | {"final norm skipped": f.without("norm")}
    notes = {
        "special": "use_aux_hidden_state false: the one capture is the target's last hidden state, after its final "
        "norm; "
        + ("fc maps it from target width to draft width" if with_fc else "there is no fc, it is used as it is"),
        "sure": LOW if with_fc else MEDIUM,
        "remark": "vLLM and TensorRT-LLM build no fc for such heads"
        + ("; a head with one would be refused by vLLM" if with_fc else " and keep the attention input of width 2H"),
        "aux": {"target_layers": 8, "stored": [], "boundaries": "after the target's final norm"},
    }
    name = "modelopt_no_aux_fc" if with_fc else "modelopt_no_aux"
    return Case(name, config, build, planted, notes, captures=1, borrows_embed=True)


def modelopt_norms_off() -> Case:
    config = modelopt_config(True, [1, 3, 4], last_norm=False, hidden_norm=False)

    def build(rng):
        out = simple(config)(rng)
        return {k: v for k, v in out.items() if k not in ("norm.weight", "midlayer.hidden_norm.weight")}

    planted = {k: v for k, v in (f.COMMON | f.MAPPED).items() if not k.startswith("norm_")}
    planted["captures reversed"] = f.captures_reversed(3)
    planted["norm of ones before the head"] = f.with_norm_of_ones
    notes = {
        "special": "use_last_layernorm false: the head reads the layer's output as it is. "
        "use_input_layernorm_in_first_layer false: the hidden half of the attention input is not normed",
        "sure": "low: as ModelOpt's Megatron plugin reads the flags; no such release is known, and refusing it is as "
        "good",
        "aux": {"target_layers": 8, "stored": [1, 3, 4], "boundaries": [2, 4, 5]},
    }
    return Case("modelopt_norms_off", config, build, planted, notes, borrows_embed=True)


def mla(own_maps: bool) -> Case:
    config = llama(architectures=["Eagle3DeepseekV2ForCausalLM"], num_attention_heads=2, num_key_value_heads=2)
    config |= {"model_type": "deepseek_v3" if own_maps else "kimi_k2", "rms_norm_eps": 1e-06, "rope_theta": 50000.0}
    config |= {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6}
    config |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config |= {"first_k_dense_replace": 0 if own_maps else 1, "num_nextn_predict_layers": 0, "attention_bias": False}
    config |= {"draft_vocab_size": 64 if own_maps else V}
    config["eagle_config"] = {IDS: [2, 4, 6], "use_aux_hidden_state": True}
    scaling = {"type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    if own_maps:
        scaling |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
    original = 256 if own_maps else 8
    config["max_position_embeddings"] = 4 * original
    config["rope_scaling"] = scaling | {"original_max_position_embeddings": original}
    prefix = "midlayer." if own_maps else "layers.0."

    def build(rng):
        out = ends(rng, 32, 96, config["draft_vocab_size"]) | mla_layer(rng, prefix, config)
        return out | (vocabulary(rng, 64) if own_maps else {})

    planted = f.COMMON | {
        "captures reversed": f.captures_reversed(3),
        "interleaved as half": f.pairing_swapped,
        "mscale not in the softmax scale": f.softmax_plain,
        "softmax scale of nope alone": f.softmax_nope_only,
        "yarn frequencies ignored": f.rope_frequencies(50000.0),
        "rope base 10000": f.rope_frequencies(10000.0),
    }
    notes = {
        "special": "multi-head latent attention with interleaved rotary pairs and yarn; softmax scale is "
        "(nope + rope)^-1/2 times (0.1 mscale_all_dim ln(factor) + 1)^2, cos and sin are not scaled since mscale "
        "equals "
        "mscale_all_dim; the MLP is dense though the config has expert keys; v_head_dim differs from qk_nope_head_dim; "
        + ("d2t and t2d, layer named midlayer" if own_maps else "full vocabulary without maps, layer named layers.0"),
        "sure": "high as vLLM serves it; TorchSpec's own trainer rotates halves, so heads from it may need the other "
        "pairing",
        "aux": {"target_layers": 9, "stored": [2, 4, 6], "boundaries": [2, 4, 6]},
        "remark": "the ids are boundaries though nested in eagle_config, as in released Kimi-K2 heads (first id not 1)",
    }
    planted = planted | (f.MAPPED if own_maps else {})
    return Case("mla_own_vocab" if own_maps else "mla", config, build, planted, notes, borrows_embed=True)


def four_captures() -> Case:
    config = llama(architectures=["LlamaForCausalLM"], bias=True) | {IDS: [2, 4, 5, 7]}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 1}

    def build(rng):
        return simple(config, inputs=128)(rng) | {"fc.bias": linear(rng, 1, 32, 4.0)[0]}

    planted = (
        f.COMMON | f.MAPPED | {"captures reversed": f.captures_reversed(4), "fc.bias ignored": f.without("fc_bias")}
    )
    notes = {
        "special": "four captures, fc [H, 4 Ht] with a bias that is not zero; SafeAILab's names, no rope_theta "
        "(10000), no "
        "head_dim; aux ids at the top level",
        "sure": "high for the numbers; SafeAILab stores no ids, at the top level they are boundaries as in vLLM",
        "aux": {"target_layers": 9, "stored": [2, 4, 5, 7], "boundaries": [2, 4, 5, 7]},
    }
    return Case("four_captures", config, build, planted, notes, captures=4, borrows_embed=True)


def own_embed_wide() -> Case:
    config = llama(head_dim=12, target_hidden_size=48, rope_theta=1e6)
    config["eagle_config"] = {IDS: [1, 3, 4], "use_aux_hidden_state": True}

    def build(rng):
        return simple(config, inputs=144)(rng) | {"embed_tokens.weight": embedding(rng, 32)}

    planted = f.COMMON | f.MAPPED | {"captures reversed": f.captures_reversed(3), "rope base 10000": f.rope_base(1e4)}
    notes = {
        "special": "target_hidden_size 48 differs from hidden_size 32, own embed_tokens; 2 heads of 12 (24) differ "
        "from 32",
        "sure": HIGH,
        "aux": {"target_layers": 8, "stored": [1, 3, 4], "boundaries": [2, 4, 5]},
    }
    return Case("own_embed_wide", config, build, planted, notes, target_width=48)


def cases() -> list[Case]:
    """In a fixed order, which the seeds depend on: append only."""
    return [
        speculators_llama(),
        speculators_qwen3(),
        specforge_eagle31(),
        specforge_yarn(),
        specforge_llama3(),
        modelopt_shared_head(),
        modelopt_no_aux(with_fc=True),
        modelopt_no_aux(with_fc=False),
        modelopt_norms_off(),
        mla(own_maps=False),
        mla(own_maps=True),
        four_captures(),
        own_embed_wide(),
    ]
