"""A pair of tiny checkpoints whose answers are known: after each character comes the next one of the alphabet.

The target's embedding is one-hot, nothing is added to the residual stream, and the head maps each character to its
successor. The draft copies the captured character x_i and says x_i + 2: right for the first drafted token, wrong for
every later one, so each cycle accepts exactly one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZE, LAYERS, HEADS, WIDTH = 64, 3, 2, 48
CAPTURE = "--capture=1,2,3"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
EOS = 63

_CONFIG = {
    "hidden_size": SIZE,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "model_type": "llama",
}


def write_target(folder: Path, tokenizer: Path) -> Path:
    """A llama folder with a copy of the folder `tokenizer` (one character a token) and a chat template that joins all
    messages."""
    shutil.copytree(tokenizer, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config = {**_CONFIG, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        "model.embed_tokens.weight": np.eye(SIZE, dtype=np.float32),
        "model.norm.weight": np.ones(SIZE, np.float32),
        "lm_head.weight": _shift(1),
    }
    for layer in range(LAYERS):
        weights |= _block(f"model.layers.{layer}.", SIZE)
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def write_draft(folder: Path) -> Path:
    """An EAGLE-3 draft in SafeAILab's format, without an embedding of its own."""
    folder.mkdir()
    config = {**_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    fuse = np.zeros((SIZE, 3 * SIZE), np.float32)
    fuse[:, :SIZE] = np.eye(SIZE)
    weights = {
        "fc.weight": fuse,
        "norm.weight": np.ones(SIZE, np.float32),
        "lm_head.weight": _shift(2),
        "midlayer.hidden_norm.weight": np.ones(SIZE, np.float32),
        **_block("midlayer.", 2 * SIZE),
    }
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def _shift(by: int) -> np.ndarray:
    """[v, d]: the logits of one-hot(t) are largest at t + by."""
    return np.roll(np.eye(SIZE, dtype=np.float32), by, axis=0)


def _block(prefix: str, attention_in: int) -> dict[str, np.ndarray]:
    """A decoder block that adds nothing: its output projections are zero, all else is random."""
    rng = np.random.default_rng(len(prefix))
    random = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)
    return {
        f"{prefix}input_layernorm.weight": np.ones(SIZE, np.float32),
        f"{prefix}post_attention_layernorm.weight": np.ones(SIZE, np.float32),
        **{f"{prefix}self_attn.{name}_proj.weight": random(SIZE, attention_in) for name in "qkv"},
        f"{prefix}self_attn.o_proj.weight": np.zeros((SIZE, SIZE), np.float32),
        f"{prefix}mlp.gate_proj.weight": random(WIDTH, SIZE),
        f"{prefix}mlp.up_proj.weight": random(WIDTH, SIZE),
        f"{prefix}mlp.down_proj.weight": np.zeros((SIZE, WIDTH), np.float32),
    }
