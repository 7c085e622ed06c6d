"""A trained draft as a folder in SafeAILab's and SpecForge's layout, float32 or with int8 projections."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, Int8, Shaped
from safetensors.numpy import save_file

from eaglejax.errors import ConfigError
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.training.weights import checkpoint_names, frozen_paths


def int8_rows(weight: Float[np.ndarray, "o i"]) -> tuple[Int8[np.ndarray, "o i"], Float[np.ndarray, "o 1"]]:
    """Symmetric int8 with one float32 factor per row.

    Of several factors up to the row's largest value over 127, the one with the least squared error is taken.
    """
    top = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12)
    best_error, best_factor = np.full(top.shape, np.inf), top / 127
    for share in np.linspace(0.7, 1.0, 16):
        factor = (share * top / 127).astype(np.float32)
        rounded = np.clip(np.rint(weight / factor), -127, 127) * factor
        error = ((rounded - weight) ** 2).sum(axis=1, keepdims=True)
        best_factor = np.where(error < best_error, factor, best_factor)
        best_error = np.minimum(error, best_error)
    factor = best_factor.astype(np.float32)
    return np.clip(np.rint(weight / factor), -127, 127).astype(np.int8), factor


def file_bytes(config: DraftConfig, *, int8: bool) -> int:
    """Bytes of the tensors that `write_draft` makes of a draft of this shape, known before it is trained."""
    draft = nnx.eval_shape(lambda: Draft(config, dtype=jnp.float32))
    total = 8 * config.draft_vocab_size + config.vocab_size
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
    int8: bool,
) -> None:
    """Writes config.json and model.safetensors.

    Arguments:
        weights: by parameter path, without the embedding, which is the target's, as is a head that the draft borrows.
        int8: projections as `X.weight` int8 and `X.weight_scale` [out, 1]; norms stay float32.
    """
    ids = np.asarray(target_ids, np.int64)
    member = np.zeros(config.vocab_size, bool)
    member[ids] = True
    tensors: dict[str, Shaped[np.ndarray, "..."]] = {"d2t": ids - np.arange(len(ids)), "t2d": member}
    for name, array in checkpoint_names(config, weights).items():
        if int8 and array.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = int8_rows(array)
        else:
            tensors[name] = np.ascontiguousarray(array, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(draft_config_json(config, int8=int8), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def draft_config_json(config: DraftConfig, *, int8: bool) -> dict[str, Any]:
    """config.json of a one-layer draft with grouped-query attention, as the trainer makes them."""
    layer = config.layers[0]
    attention, mlp = layer.attention, layer.mlp
    plain = isinstance(attention, GQAConfig) and isinstance(mlp, DenseConfig) and attention.rope.kind == "default"
    if not plain or len(config.layers) != 1:
        raise ConfigError("only a one-layer draft with plain grouped-query attention is written", where="draft")
    assert isinstance(attention, GQAConfig) and isinstance(mlp, DenseConfig)
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": mlp.width,
        "hidden_act": mlp.activation,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "eaglejax": {"boundaries": list(config.boundaries)},
        "torch_dtype": "float32",
    }
    if config.max_position:
        values["max_position_embeddings"] = config.max_position
    if int8:
        values["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return values
