"""A draft as a folder that others read: SafeAILab's and SpecForge's layout, or vLLM speculators'.

Capture layers are numbered as each reader counts them: SpecForge and SGLang read `eagle_config`, by layer output
(boundary b is the output of layer b - 1); speculators and vLLM read the top level, where id b is boundary b. Both are
written where both can be said, and our own manifest states boundaries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, Shaped
from safetensors.numpy import save_file

from eaglejax.errors import ConfigError
from eaglejax.models.capture import IDS_KEY, MANIFEST_KEY
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, RopeConfig
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.training.int8 import int8_rows
from eaglejax.training.weights import checkpoint_names, frozen_paths

Form = Literal["safeailab", "speculators"]
FORMS: tuple[Form, ...] = ("safeailab", "speculators")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def file_bytes(config: DraftConfig, *, int8: bool) -> int:
    """Bytes of the tensors that `write_draft` makes of a draft of this shape, known before it is trained."""
    draft = nnx.eval_shape(lambda: Draft(config, dtype=jnp.float32))
    total = (4 if int8 else 8) * config.draft_vocab_size + config.vocab_size
    for path, leaf in leaves(draft).items():
        if path in frozen_paths(config):
            continue
        size, rows = math.prod(leaf.shape), math.prod(leaf.shape[:-1])
        total += size + 4 * rows if int8 and len(leaf.shape) > 1 else 4 * size
    return total


def write_draft(
    folder: Path,
    config: DraftConfig,
    weights: Mapping[str, Float[np.ndarray, "..."]],
    target_ids: Int[np.ndarray, " w"],
    *,
    int8: bool = False,
    form: Form = "safeailab",
    embedding: Float[np.ndarray, "v d"] | None = None,
    head: Float[np.ndarray, "w d"] | None = None,
    verifier: str | None = None,
) -> None:
    """Writes config.json and model.safetensors.

    Arguments:
        weights: by parameter path, without the embedding, which is the target's, as is a head that the draft borrows.
        int8: projections as `X.weight` int8 and `X.weight_scale` [out, 1]; norms stay float32.
        embedding, head: written too, for readers that lend none; speculators' layout holds them always.
        verifier: name of the target, for speculators' config.

    Raises ConfigError for a draft that the layout cannot say.
    """
    check_form(config, form, int8)
    if config.own_embedding and embedding is None:
        raise ConfigError("the draft's own embedding is missing", where="embedding")
    if form == "speculators" and (embedding is None or (head is None and not config.own_head)):
        raise ConfigError("this layout holds embedding and head", where="form", found=form, fix="give the target's")
    # other readers expect int64; int8 weights with a factor beside them are for ours
    ids = np.asarray(target_ids, np.int32 if int8 else np.int64)
    member = np.zeros(config.vocab_size, bool)
    member[ids] = True
    tensors: dict[str, Shaped[np.ndarray, "..."]] = {"d2t": ids - np.arange(len(ids), dtype=ids.dtype), "t2d": member}
    named = checkpoint_names(config, weights)
    if head is not None and not config.own_head:
        named["lm_head.weight"] = head
    for name, array in named.items():
        if form == "speculators":
            name = name.replace("midlayer.", "layers.0.", 1)
        if int8 and array.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = int8_rows(array)
        else:
            tensors[name] = np.ascontiguousarray(array, np.float32)
    if embedding is not None:
        tensors["embed_tokens.weight"] = np.ascontiguousarray(embedding, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    values = draft_config_json(config, int8=int8) if form == "safeailab" else speculators_json(config, verifier)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_form(config: DraftConfig, form: Form, int8: bool = False) -> None:
    """Refuse what a layout has no words for. Raises ConfigError naming it."""
    layer = config.layers[0]
    attention, odd = layer.attention, []
    if not isinstance(attention, GQAConfig) or not isinstance(layer.mlp, DenseConfig):
        odd.append("latent attention or experts")
    else:
        plain = RopeConfig(attention.rope.theta, attention.head_dim)
        odd += ["RoPE scaling"] if attention.rope != plain else []
        odd += [name for name in ("qkv_bias", "output_bias", "qk_norm", "sinks", "window") if getattr(attention, name)]
        odd += ["MLP bias"] if layer.mlp.bias else []
    odd += [f"{len(config.layers)} layers"] if len(config.layers) != 1 else []
    odd += [f"no {name}" for name in ("fc", "input_norm", "hidden_norm", "final_norm") if not getattr(config, name)]
    odd += [name for name in ("fc_bias", "target_norm_eps") if getattr(config, name)]
    if form == "speculators" and int8:
        odd.append("int8 weights")
    if odd:
        raise ConfigError("this layout cannot say", where=f"export as {form}", found=", ".join(odd))


def _layer_json(config: DraftConfig) -> dict[str, Any]:
    """The keys of the decoder layer, as in a Llama config."""
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert isinstance(attention, GQAConfig) and isinstance(mlp, DenseConfig)
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.width,
        "hidden_act": mlp.activation,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if config.max_position:
        values["max_position_embeddings"] = config.max_position
    return values


def draft_config_json(config: DraftConfig, *, int8: bool) -> dict[str, Any]:
    """config.json in SafeAILab's and SpecForge's layout."""
    check_form(config, "safeailab")
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_json(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS_KEY: list(config.boundaries),
        MANIFEST_KEY: {"boundaries": list(config.boundaries)},
        "torch_dtype": "float32",
        **{flag: True for flag in FLAGS if getattr(config, flag)},
    }
    if min(config.boundaries) > 0:  # the embedding is no layer's output
        outputs = [boundary - 1 for boundary in config.boundaries]
        values["eagle_config"] = {IDS_KEY: outputs, "use_aux_hidden_state": True}
    if int8:
        values["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return values


def speculators_json(config: DraftConfig, verifier: str | None) -> dict[str, Any]:
    """config.json in speculators' layout: the layer nested, capture ids at the top, by input."""
    check_form(config, "speculators")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        IDS_KEY: list(config.boundaries),
        "transformer_layer_config": _layer_json(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        MANIFEST_KEY: {"boundaries": list(config.boundaries)},
        "torch_dtype": "float32",
    }
