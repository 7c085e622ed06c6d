"""Kit M: pairs of a target and a draft whose answers are known by construction, written as Hugging Face folders.

Vocabulary 64, hidden width 128. The target's embedding of token t is the one-hot vector t in dimensions 0..63;
attention adds nothing; the feed-forward part of layer k adds exactly 1 to dimension 64 + k (its tag). So after b blocks
the state is one-hot(t) and b tags, and the head, log P over the scale of the final norm, gives row P[t]. The draft's fc
turns the captured states into one-hot(t), plus a large random vector times (tags seen - tags expected) for every
capture: right boundaries give exactly one-hot(t), any other garbage. Its attention sees only its own position and
replaces the hidden one-hot by that of the token, so the row (token x, state before it) gives row Q[x], at every depth.

Blind to attention, cache and RoPE faults. Use a small random pair for those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN = 64, 128
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 16
EOS = 63
Tensors = dict[str, np.ndarray]


def ring(length: int = 60, start: int = 3) -> np.ndarray:
    """Next token of every token: one cycle through `length` tokens from `start` on; the others lead into it."""
    following = np.full(VOCAB, start)
    following[start : start + length] = start + (np.arange(length) + 1) % length
    return following


def sharp(following: Sequence[int] | np.ndarray, top: float = 0.999) -> np.ndarray:
    """A matrix whose row t gives `top` to following[t] and shares the rest; rows sum to 1."""
    matrix = np.full((VOCAB, VOCAB), (1 - top) / (VOCAB - 1))
    matrix[np.arange(VOCAB), following] = top
    return matrix


def greedy_chain(
    p: np.ndarray, q: np.ndarray, prompt_end: int, tokens: int, num_steps: int
) -> tuple[list[int], list[int]]:
    """Output and accepted drafts of every cycle of a chain of `num_steps` drafts at temperature 0, EOS not honoured.

    The first token comes from the prefill. Accepted drafts are counted before any cut by the budget.
    """
    out, accepted = [int(p[prompt_end].argmax())], []
    while len(out) < tokens:
        token, count = out[-1], 0
        while count < num_steps and q[token].argmax() == p[token].argmax():
            token, count = int(p[token].argmax()), count + 1
        accepted.append(count)
        for _ in range(count + 1):
            out.append(int(p[out[-1]].argmax()))
    return out[:tokens], accepted


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def _log(matrix: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(matrix, 1e-12))


def target_tensors(p: np.ndarray, layers: int, rows: int = VOCAB, seed: int = 0) -> Tensors:
    """A Llama target of `layers` blocks; embedding and head padded to `rows` (noise rows that are never chosen)."""
    rng = np.random.default_rng(seed)
    eps = 1e-6
    draw = lambda *shape: rng.normal(0, 0.1, shape).astype(np.float32)
    embedding = np.zeros((rows, HIDDEN), np.float32)
    embedding[:VOCAB, :VOCAB] = np.eye(VOCAB)
    embedding[VOCAB:] = draw(rows - VOCAB, HIDDEN)
    scale = lambda squares: 1 / np.sqrt(squares / HIDDEN + eps)
    head = np.zeros((rows, HIDDEN), np.float32)
    head[:VOCAB, :VOCAB] = (_log(p) / scale(1 + layers)).T
    if rows > VOCAB:
        head[VOCAB:, :VOCAB] = -1e3
    out: Tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    width = 32
    for k in range(layers):
        prefix = f"model.layers.{k}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
        out |= {f"{prefix}self_attn.{n}_proj.weight": draw(w, HIDDEN) for n, w in (("q", 128), ("k", 64), ("v", 64))}
        out[f"{prefix}self_attn.o_proj.weight"] = np.zeros((HIDDEN, 128), np.float32)
        # gate and up read the sum of the one-hot block, which is the norm's scale whatever the token
        height = scale(1 + k)
        gate, up, down = (np.zeros(shape, np.float32) for shape in ((width, HIDDEN), (width, HIDDEN), (HIDDEN, width)))
        gate[0, :VOCAB] = up[0, :VOCAB] = 1
        down[VOCAB + k, 0] = 1 / (height / (1 + np.exp(-height)) * height)
        out |= {
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": down,
        }
    return out


def target_config(layers: int, rows: int = VOCAB, **more: Any) -> dict[str, Any]:
    """config.json of the Llama target."""
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=HIDDEN, intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=1e-6,
        rope_theta=10000.0, hidden_act="silu",
        max_position_embeddings=4096, vocab_size=rows, bos_token_id=0, eos_token_id=EOS, tie_word_embeddings=False,
        torch_dtype="float32",
    )  # fmt: skip
    return config | more


def write_target(
    folder: Path, p: np.ndarray, *, layers: int = 8, rows: int = VOCAB, tokenizer: bool = True, **more: Any
) -> Path:
    """A target whose next token is distributed as row P[t]; `more` are config keys."""
    write_folder(folder, target_config(layers, rows, **more), target_tensors(p, layers, rows))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One character per token: ids 0..63 are the characters of `ALPHABET`."""
    vocab = {character: index for index, character in enumerate(ALPHABET)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "fuse_unk": False}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": {"type": "Fuse"},
                "model": model,
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.!"


def draft_tensors(
    q: np.ndarray,
    boundaries: Sequence[int],
    *,
    ids: Sequence[int] | None = None,
    seed: int = 1,
    prefix: str = "midlayer.",
) -> Tensors:
    """A draft that proposes from row Q[x] after token x where its captures come from `boundaries`.

    `ids`: the target ids that it knows (ascending), with d2t and t2d; None for all of them without maps. No embedding:
        it borrows the target's.
    """
    rng = np.random.default_rng(seed)
    eps = 1e-5
    scale = 1 / np.sqrt(1 / HIDDEN + eps)
    fc = np.zeros((HIDDEN, HIDDEN * len(boundaries)))
    fc[:VOCAB, :VOCAB] = np.eye(VOCAB)
    for i, boundary in enumerate(boundaries):
        garbage = rng.normal(0, 50, HIDDEN)[:, None]
        fc[:, i * HIDDEN + VOCAB : (i + 1) * HIDDEN] += garbage
        fc[:, i * HIDDEN : i * HIDDEN + VOCAB] -= garbage * boundary
    zeros = lambda *shape: np.zeros(shape, np.float64)
    # queries and keys are constants, keys so large that RoPE leaves a row nothing but itself
    query, key, value = (
        zeros(HEADS * HEAD_DIM, 2 * HIDDEN),
        zeros(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        zeros(VOCAB, 2 * HIDDEN),
    )
    query[:, :VOCAB] = 1 / scale
    key[:, :VOCAB] = 60 * np.sqrt(HEAD_DIM) / scale
    value[:, :VOCAB], value[:, HIDDEN : HIDDEN + VOCAB] = np.eye(VOCAB) / scale, -np.eye(VOCAB) / scale
    output = zeros(HIDDEN, HEADS * HEAD_DIM)
    for token in range(VOCAB):
        # the first of the two query heads that share a key/value head
        output[token, 2 * (token // HEAD_DIM) * HEAD_DIM + token % HEAD_DIM] = 1
    known = range(VOCAB) if ids is None else ids
    head = zeros(len(known), HIDDEN)
    head[:, :VOCAB] = (_log(q[:, list(known)]) / scale).T
    ones = np.ones(HIDDEN)
    out = {
        "fc.weight": fc, "lm_head.weight": head, "norm.weight": ones, f"{prefix}hidden_norm.weight": ones,
        f"{prefix}input_layernorm.weight": ones, f"{prefix}post_attention_layernorm.weight": ones,
        f"{prefix}self_attn.q_proj.weight": query, f"{prefix}self_attn.k_proj.weight": key,
        f"{prefix}self_attn.v_proj.weight": value,
        f"{prefix}self_attn.o_proj.weight": output, f"{prefix}mlp.gate_proj.weight": zeros(32, HIDDEN),
        f"{prefix}mlp.up_proj.weight": zeros(32, HIDDEN), f"{prefix}mlp.down_proj.weight": zeros(HIDDEN, 32),
    }  # fmt: skip
    tensors: Tensors = {name: array.astype(np.float32) for name, array in out.items()}
    if ids is not None:
        tensors["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def draft_config(draft_vocab: int | None = VOCAB, **more: Any) -> dict[str, Any]:
    """config.json of the draft, as SafeAILab's releases write it; `more` overrides and adds keys."""
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=HIDDEN, intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, hidden_act="silu",
        max_position_embeddings=2048,
        vocab_size=VOCAB, draft_vocab_size=draft_vocab, bos_token_id=0, eos_token_id=EOS, pad_token_id=0,
        tie_word_embeddings=False, torch_dtype="float32",
        use_cache=True, initializer_range=0.02, transformers_version="4.53.1",
    )  # fmt: skip
    return config | more


def write_draft(
    folder: Path,
    q: np.ndarray,
    boundaries: Sequence[int] = (2, 4, 5),
    *,
    ids: Sequence[int] | None = None,
    tensors: Tensors | None = None,
    **more: Any,
) -> Path:
    """A draft's folder; `tensors` are added to (or replace) those of `draft_tensors`, `more` are config keys."""
    count = VOCAB if ids is None else len(ids)
    return write_folder(folder, draft_config(count, **more), draft_tensors(q, boundaries, ids=ids) | (tensors or {}))
