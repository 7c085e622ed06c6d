"""Differences with random experts on small bases of the llama family."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from checkpoint_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, WIDTH, llama_weights, write_safetensors

from eaglejax.checkpoint.difference import difference_config
from eaglejax.checkpoint.difference_writer import RoutedLayer, write_difference

EXPERTS, TOPK, FFN, DENSE = 4, 2, 16, 1
BASE_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
}


def write_base(folder: Path, **config) -> Path:
    """A dense llama folder of two layers, small weights."""
    folder.mkdir(parents=True)
    weights = {name: 0.1 * weight for name, weight in llama_weights().items()}
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG | config))
    return folder


def routed_layer(rng: np.random.Generator, experts: int, width: int, hidden: int, scale: float = 0.4) -> RoutedLayer:
    """Random experts."""
    make = lambda *shape: (scale * rng.standard_normal(shape)).astype(np.float32)
    return RoutedLayer(
        router=make(experts, hidden) / scale,
        correction=make(experts),
        gate=make(experts, width, hidden),
        up=make(experts, width, hidden),
        down=make(experts, hidden, width),
    )


def small_config(base: str = "../base", **config) -> dict:
    """Of a difference on `write_base`'s model: layer 0 dense, layer 1 with experts."""
    made = difference_config(BASE_CONFIG, base, dense_layers=DENSE, experts=EXPERTS, topk=TOPK, width=FFN)
    return made | config


def small_layers(seed: int = 0) -> dict[int, RoutedLayer]:
    """Random experts for `small_config`."""
    rng = np.random.default_rng(seed)
    return {layer: routed_layer(rng, EXPERTS, FFN, HIDDEN) for layer in range(DENSE, LAYERS)}


def without_experts(layers: dict[int, RoutedLayer]) -> dict[int, RoutedLayer]:
    """The same with zeros for down projections: nothing is added to the base."""
    return {index: replace(layer, down=np.zeros_like(layer.down)) for index, layer in layers.items()}


def write_small(folder: Path, seed: int = 0) -> Path:
    """Base and difference in `folder`; returns the difference's own folder."""
    write_base(folder / "base")
    write_difference(folder / "moe", small_config(), small_layers(seed))
    return folder / "moe"
