"""The form of a difference: routed experts beside a dense base model, which is not stored again.

A folder with such a checkpoint holds a config.json of the family glm4_moe and model.safetensors. The config's key
`eaglejax` says {"base": NAME, "difference": "int8-rows"}: NAME is a built-in model, or a path relative to the folder.
The base's own FFN is the shared expert of every MoE layer, unchanged; the file holds what stands beside it, for each
MoE layer l (E experts of width F, hidden size D):

    model.layers.l.mlp.gate.weight                    [E, D] F32 or BF16: the router
    model.layers.l.mlp.gate.e_score_correction_bias   [E]    F32 or BF16
    model.layers.l.mlp.experts.gate_proj              [E, F, D] I8, with gate_proj_scale [E, F] F32
    model.layers.l.mlp.experts.up_proj                [E, F, D] I8, with up_proj_scale [E, F] F32
    model.layers.l.mlp.experts.down_proj_transposed   [E, F, D] I8, with down_proj_transposed_scale [E, F] F32

A weight is its int8 value times the scale of its row. The down projections lie transposed: rows of D are long enough
for one scale each, rows of F are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.capture import MANIFEST_KEY

FORM = "int8-rows"
FAMILY = "glm4_moe"
FILE = "model.safetensors"
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj_transposed"


def router_name(layer: int) -> str:
    """The router's weight, in the difference and in the whole model."""
    return f"model.layers.{layer}.mlp.gate.weight"


def correction_name(layer: int) -> str:
    """The bias of the router's choice, in the difference and in the whole model."""
    return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"


def stored_name(layer: int, part: str) -> str:
    """The int8 values of all experts of a layer; `part` is GATE, UP or DOWN."""
    return f"model.layers.{layer}.mlp.experts.{part}"


def scale_name(layer: int, part: str) -> str:
    """The scales of `stored_name`."""
    return f"{stored_name(layer, part)}_scale"


def difference_config(
    base: Mapping[str, Any],
    name: str,
    *,
    dense_layers: int,
    experts: int,
    topk: int,
    width: int,
    scaling: float = 1.0,
) -> dict[str, Any]:
    """The config.json of a difference on a dense llama model.

    Arguments:
        base: the base's config (`CheckpointReader.hf_config` of a GGUF file, or its config.json).
        name: how the base is found: a built-in name, or a path relative to the difference's folder.
        dense_layers: layers at the start that stay dense.
        experts, topk, width: routed experts of a layer, how many of them a token takes, and the width of each, which
            must divide the width of the base's FFN (the config counts shared experts in units of it).
        scaling: what the routed experts' weights are multiplied with.

    Raises:
        ConfigError: a base that is no dense llama model without biases; numbers that do not fit it.
    """
    for key, only in (("model_type", "llama"), ("attention_bias", False), ("mlp_bias", False)):
        if (found := base.get(key, only)) != only:
            raise ConfigError(
                "no base for routed experts", where=f"base: {key}", found=repr(found), expected=repr(only)
            )
    dense, layers = base["intermediate_size"], base["num_hidden_layers"]
    if width < 1 or dense % width:
        raise ConfigError("must divide the base's FFN width", where="width", found=width, expected=f"{dense} / n")
    if not 0 <= dense_layers < layers:
        raise ConfigError("out of range", where="dense_layers", found=dense_layers, expected=f"0 to {layers - 1}")
    if not 1 <= topk <= experts:
        raise ConfigError("out of range", where="topk", found=topk, expected=f"1 to {experts}")
    heads, hidden = base["num_attention_heads"], base["hidden_size"]
    tokens = {key: base[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if base.get(key) is not None}
    return {
        "model_type": FAMILY,
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": base["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": dense,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": base.get("num_key_value_heads") or heads,
        "head_dim": base.get("head_dim") or hidden // heads,
        "hidden_act": base.get("hidden_act", "silu"),
        "max_position_embeddings": base["max_position_embeddings"],
        "rms_norm_eps": base["rms_norm_eps"],
        "rope_theta": base.get("rope_theta", 10000.0),
        "rope_scaling": base.get("rope_scaling"),
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": base.get("tie_word_embeddings", False),
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "n_shared_experts": dense // width,
        "norm_topk_prob": True,
        "routed_scaling_factor": scaling,
        "n_group": 1,
        "topk_group": 1,
        **tokens,
        MANIFEST_KEY: {"base": name, "difference": FORM},
    }
