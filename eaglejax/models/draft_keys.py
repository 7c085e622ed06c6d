"""Config keys and tensors that a draft may carry without changing its forward pass, and those that may not be passed
over.

A key nobody reads is how acceptance is lost without an error. Keys read by us or known to be harmless are listed here;
an unknown one is refused where its name could change the forward pass or a tensor carries the same name, else it is
listed in the load report.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.capture import IDS_KEY, MANIFEST_KEY
from eaglejax.models.draft_formats import ALIASES, FLAGS, FlatConfig
from eaglejax.models.hf_config import HARMLESS as TARGET_HARMLESS

READ = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "hidden_act", "hidden_activation", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "rope_interleave", "max_position_embeddings", "original_max_position_embeddings",
    "vocab_size", "draft_vocab_size", "target_hidden_size", "attention_bias", "mlp_bias", "bias", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings", "model_type",
    "architectures", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "quantization_config", "eagle_config", "transformer_layer_config", "speculators_model_type", "ptd_token_id",
    "pard_token", "mask_token_id", "parallel_drafting", "mtp_config", "efficient_lm_head_config", "dflash_config",
    "target_layer_ids",
    # ours alone, for draft_config=: what a file holds where nothing in it says so
    "d2t", "rope_pairing",
    IDS_KEY, MANIFEST_KEY, *FLAGS, *ALIASES,
}  # fmt: skip

HARMLESS = TARGET_HARMLESS | {
    # identity, and training alone
    "producer", "speculators_version", "speculators_config", "verifier", "eagle_decoder_type",
    "num_lookahead_tokens", "eagle_architecture_config", "embed_requires_grad", "ttt_steps", "loss_type",
    "eagle_loss_decay_factor", "eagle_ttt_steps", "eagle_freeze_base_model", "eagle_hidden_state_distillation",
    "eagle_self_logit_distillation", "eagle_offline", "eagle_reuse_base_decoder", "eagle_mix_hidden_states",
    "eagle_report_acc", "has_lm_head", "use_torch_compile", "next_layer_regular", "parallel_draft_heads_num_layers",
    # experts and routers, in configs copied from the target: a draft's MLP is dense, and experts in the file would be
    # unknown tensors
    "moe_intermediate_size", "shared_expert_intermediate_size", "n_group", "topk_group", "n_routed_experts",
    "n_shared_experts", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob",
    "routed_scaling_factor", "scoring_func", "topk_method", "first_k_dense_replace", "moe_layer_freq",
    "decoder_sparse_step", "mlp_only_layers", "qk_head_dim",
}  # fmt: skip

# Values that switch nothing on, of keys that are otherwise refused.
NEUTRAL = {"parallel_draft_step": 1}

# Words in an unknown key or tensor that name a part of a forward pass.
FORWARD = re.compile(
    r"norm|scal|multipl|softcap|clip|bias|resid|rope|rotary|attn|attention|window|sliding|mask|parallel|fus|(^|[._])fc|gate|expert|lora|adapter|"
    r"capture|aux|hidden|embed|head|layer|proj|mlp|conv|sink|^use_|position|alibi|codebook|packed|qweight|zero_point"
)
# Tensors of training and of tables that are computed here: known not to be weights.
LEFTOVER = re.compile(
    r"rotary_emb\.|inv_freq|cos_cached|sin_cached|rotary_pos_emb|position_ids$|exp_avg|momentum|^optim|optimizer|scheduler|"
    r"global_step|(^|\.)step$|num_updates|grad_scaler|rng_state|^verifier_|masked_bias$|input_scale$|(^|\.)ema\.|loss"
)


def check_keys(flat: FlatConfig, tensors: Collection[str], where: object) -> list[str]:
    """The unknown but harmless keys of a draft's config, for the load report; raises ConfigError for one that could
    change the forward pass.

    Arguments:
        tensors: the names of the checkpoint's tensors; an unknown key whose name occurs in one of them is refused.
        where: the config file, for messages.
    """
    listed = []
    places: list[tuple[str, Mapping[str, Any]]] = [("", flat.top)]
    places += [
        (f"{key}.", flat.top[key])
        for key in ("eagle_config", "transformer_layer_config")
        if isinstance(flat.top.get(key), dict)
    ]
    for place, values in places:
        for key, value in values.items():
            if key in READ or key in HARMLESS:
                continue
            named = [tensor for tensor in tensors if key in tensor]
            if _says_nothing(key, value) or not (named or FORWARD.search(key)):
                listed.append(f"{place}{key}")
                continue
            raise ConfigError(
                "an unknown key could change the draft's forward pass",
                where=f"{where}: {place}{key}",
                found=repr(value) + (f", and a tensor {named[0]}" if named else ""),
                expected="a key that EagleJax knows",
                fix="remove the key if the draft works without it; else this draft is not supported",
            )
    return listed


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a value switches nothing on: null, false, zero, empty, or a factor of one."""
    if (not value and not isinstance(value, str)) or NEUTRAL.get(key) == value:
        return True
    factor = re.search(r"scal|multipl", key) is not None and not isinstance(value, bool)
    return value == "" or (factor and value == 1)
