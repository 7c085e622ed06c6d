"""An EAGLE-3 draft in plain float64 numpy: the reference that the draft formats are tested against.

Written from descriptions of the released formats only; it shares no code with the package. It is slow, it handles
one sequence at a time, and every choice a checkpoint can make is one field of `Draft`, so that a test can flip a
single choice (`dataclasses.replace`) and measure what that mistake would do.

The network, one row per token (d: draft width H, a: joined capture width):
    g        = fc(norms(captures))              only for rows fed from the target; later rows are fed a hidden state
    x        = [input_layernorm(embed(token)), hidden_norm(g)]              width 2H, embedding first
    residual = g, or hidden_norm(g) with norm_before_residual
    h        = residual + attention(x);  h = h + mlp(post_attention_layernorm(h));  then ordinary layers, if any
    logits   = lm_head(norm(h));   fed to the next row: h, or norm(h) with norm_output
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from rope_numpy import Rope, read_rope, rotate
from safetensors.numpy import load_file

Array = np.ndarray
Cache = list[tuple[Array, Array]]
"""Per layer the keys [s, h, c] (rotated) and values [s, h, c] of the rows so far."""


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer under their released names without the `layers.N.` or `midlayer.` prefix."""

    weights: dict[str, Array]
    first: bool
    window: int | None = None

    def __getitem__(self, name: str) -> Array:
        return self.weights[f"{name}.weight"]

    def get(self, name: str) -> Array | None:
        return self.weights.get(f"{name}.weight")


@dataclass(frozen=True)
class Draft:
    """A draft and every choice its checkpoint makes."""

    layers: list[Layer]
    embed: Float[Array, "v d"]
    lm_head: Float[Array, "w d"]
    norm: Float[Array, " d"] | None
    fc: Float[Array, "d a"] | None
    fc_bias: Float[Array, " d"] | None
    fc_norms: list[Array] | None
    input_norm: Float[Array, " a"] | None
    target_ids: Int[Array, " w"]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    softmax_scale: float
    mla: dict[str, int] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    def features(self, captures: Float[Array, "t a"]) -> Float[Array, "t d"]:
        """Captured states to draft width: optional norms, then fc. Without fc the captures are used as they are."""
        if self.input_norm is not None:
            captures = rms_norm(captures, self.input_norm, self.eps)
        if self.fc_norms is not None:
            chunks = np.split(captures, len(self.fc_norms), axis=-1)
            captures = np.concatenate(
                [rms_norm(c, w, self.eps) for c, w in zip(chunks, self.fc_norms, strict=True)], -1
            )
        if self.fc is None:
            return captures
        return captures @ self.fc.T + (0.0 if self.fc_bias is None else self.fc_bias)

    def step(
        self,
        tokens: Int[Array, " t"],
        hidden: Float[Array, "t d"],
        positions: Int[Array, " t"],
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "t d"], Cache]:
        """Runs rows of (token, hidden); each sees the cache and the rows before it. Returns h before the final norm.

        The cache is assumed to hold positions positions[0]-len(cache) .. positions[0]-1, so that windows can be cut.
        """
        cache = cache or [(np.zeros((0, 1, 1)), np.zeros((0, 1, 1)))] * len(self.layers)
        grown: Cache = []
        for layer, past in zip(self.layers, cache, strict=True):
            if layer.first:
                normed = (
                    hidden if layer.get("hidden_norm") is None else rms_norm(hidden, layer["hidden_norm"], self.eps)
                )
                embedded = rms_norm(self.embed[tokens], layer["input_layernorm"], self.eps)
                residual = normed if self.norm_before_residual else hidden
                x = np.concatenate([embedded, normed], axis=-1)
            else:
                residual = hidden
                x = rms_norm(hidden, layer["input_layernorm"], self.eps)
            query, key, value = (_mla_qkv if self.mla else _qkv)(self, layer, x, positions)
            if len(past[0]):
                key, value = np.concatenate([past[0], key]), np.concatenate([past[1], value])
            grown.append((key, value))
            hidden = (
                residual + _attend(query, key, value, self.softmax_scale, layer.window) @ layer["self_attn.o_proj"].T
            )
            hidden = hidden + _mlp(layer, rms_norm(hidden, layer["post_attention_layernorm"], self.eps))
        return hidden, grown

    def normed(self, hidden: Float[Array, "t d"]) -> Float[Array, "t d"]:
        return hidden if self.norm is None else rms_norm(hidden, self.norm, self.eps)

    def feedback(self, hidden: Float[Array, "t d"]) -> Float[Array, "t d"]:
        """What the next row is fed for a row whose layer output is `hidden`."""
        return self.normed(hidden) if self.norm_output else hidden

    def logits(self, hidden: Float[Array, "t d"]) -> Float[Array, "t w"]:
        return self.normed(hidden) @ self.lm_head.T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _mlp(layer: Layer, x: Array) -> Array:
    gate = x @ layer["mlp.gate_proj"].T
    return (gate / (1.0 + np.exp(-gate)) * (x @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T


def _qkv(draft: Draft, layer: Layer, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Grouped-query attention; optional per-head norms come before the rotation."""
    query = (x @ layer["self_attn.q_proj"].T).reshape(len(x), draft.heads, draft.head_dim)
    key = (x @ layer["self_attn.k_proj"].T).reshape(len(x), draft.kv_heads, draft.head_dim)
    value = (x @ layer["self_attn.v_proj"].T).reshape(len(x), draft.kv_heads, draft.head_dim)
    q_norm, k_norm = layer.get("self_attn.q_norm"), layer.get("self_attn.k_norm")
    if q_norm is not None:
        query = rms_norm(query, q_norm, draft.eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, draft.eps)
    query, key = rotate(query, positions, draft.rope), rotate(key, positions, draft.rope)
    groups = draft.heads // draft.kv_heads
    return query, np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)


def _mla_qkv(draft: Draft, layer: Layer, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Multi-head latent attention, written out: per head [nope, rope] for query and key, one rope key for all heads."""
    assert draft.mla is not None
    nope, rope, wide, rank = (draft.mla[k] for k in ("nope", "rope", "value", "kv_rank"))
    latent_q = rms_norm(x @ layer["self_attn.q_a_proj"].T, layer["self_attn.q_a_layernorm"], draft.eps)
    query = (latent_q @ layer["self_attn.q_b_proj"].T).reshape(len(x), draft.heads, nope + rope)
    compressed = x @ layer["self_attn.kv_a_proj_with_mqa"].T
    latent = rms_norm(compressed[:, :rank], layer["self_attn.kv_a_layernorm"], draft.eps)
    both = (latent @ layer["self_attn.kv_b_proj"].T).reshape(len(x), draft.heads, nope + wide)
    rope_key = np.repeat(rotate(compressed[:, None, rank:], positions, draft.rope), draft.heads, axis=1)
    rope_query = rotate(query[..., nope:], positions, draft.rope)
    query = np.concatenate([query[..., :nope], rope_query], axis=-1)
    return query, np.concatenate([both[..., :nope], rope_key], axis=-1), both[..., nope:]


def visible(rows: int, columns: int, window: int | None) -> Bool[Array, "rows columns"]:
    """Causal, the rows being the last of the columns; with a window, row i sees columns i-window+1 .. i."""
    i, j = np.arange(columns - rows, columns)[:, None], np.arange(columns)[None, :]
    return (j <= i) & ((i - j < window) if window is not None else True)


def _attend(query: Array, key: Array, value: Array, scale: float, window: int | None) -> Array:
    scores = np.einsum("thc,shc->hts", query, key) * scale
    scores = np.where(visible(len(query), len(key), window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shc->thc", weights, value).reshape(len(query), -1)


def read_draft(
    config: dict[str, Any],
    tensors: dict[str, Array],
    embed: Array | None = None,
    head: Array | None = None,
) -> Draft:
    """Builds a `Draft` from a released config and its tensors.

    `embed` and `head` are the target's and are used only where the file holds none.
    """
    inner = {**config, **config.get("transformer_layer_config", {})}
    if "transformer_layer_config" in config:
        inner |= {k: v for k, v in config.items() if k not in ("architectures", "transformer_layer_config")}
    wide = {k: (v.astype(np.float64) if v.dtype.kind == "f" else v) for k, v in tensors.items()}
    lm_head = wide.get("lm_head.weight", head)
    embedding = wide.get("embed_tokens.weight", embed)
    if lm_head is None or embedding is None:
        raise ValueError("the draft file lacks lm_head or embed_tokens and the target's was not given")
    d2t = wide.get("d2t", np.zeros(len(lm_head), np.int64))
    heads = inner["num_attention_heads"]
    mla = None
    head_dim = inner.get("head_dim") or inner["hidden_size"] // heads
    if inner.get("kv_lora_rank"):
        mla = {"nope": inner["qk_nope_head_dim"], "rope": inner["qk_rope_head_dim"], "value": inner["v_head_dim"]}
        mla |= {"kv_rank": inner["kv_lora_rank"]}
        head_dim = mla["nope"] + mla["rope"]
    rope = read_rope(inner, mla["rope"] if mla else head_dim, interleaved=mla is not None)
    norms = [wide[k] for k in sorted(k for k in wide if k.startswith("fc_norm."))]
    # vLLM: a speculators config without the key means true, every other config means false
    before = inner.get("norm_before_residual", "speculators_model_type" in config)
    return Draft(
        layers=_layers(inner, wide),
        embed=np.asarray(embedding, np.float64),
        lm_head=np.asarray(lm_head, np.float64),
        norm=wide.get("norm.weight"),
        fc=wide.get("fc.weight"),
        fc_bias=wide.get("fc.bias"),
        fc_norms=norms or None,
        input_norm=wide.get("input_norm.weight"),
        target_ids=np.arange(len(lm_head)) + d2t,
        heads=heads,
        kv_heads=inner.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        eps=inner["rms_norm_eps"],
        rope=rope,
        softmax_scale=head_dim**-0.5 * (rope.softmax_factor if mla else 1.0),
        mla=mla,
        norm_before_residual=bool(before),
        norm_output=bool(inner.get("norm_output", False)),
    )


def _layers(config: dict[str, Any], tensors: dict[str, Array]) -> list[Layer]:
    """Counts layers by their tensors, since released configs carry stale counts."""
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    count = 1 + max(int(k.split(".")[1]) for k in renamed if k.startswith("layers."))
    kinds = config.get("layer_types") or ["full_attention"] * count
    layers = []
    for i in range(count):
        prefix = f"layers.{i}."
        weights = {k.removeprefix(prefix): v for k, v in renamed.items() if k.startswith(prefix)}
        window = config["sliding_window"] if kinds[i] == "sliding_attention" else None
        layers.append(Layer(weights, first=i == 0, window=window))
    return layers


def load_case(folder: Path, config_name: str = "config.json") -> Draft:
    """Reads a fixture folder: config, model, and the target's embedding or head where they are given."""
    extra: dict[str, Array | None] = {"embed": None, "head": None}
    if (folder / "embed.safetensors").exists():
        extra["embed"] = load_file(folder / "embed.safetensors")["model.embed_tokens.weight"]
    if (folder / "target_head.safetensors").exists():
        extra["head"] = load_file(folder / "target_head.safetensors")["lm_head.weight"]
    config = json.loads((folder / config_name).read_text())
    return read_draft(config, load_file(folder / "model.safetensors"), **extra)


def run_case(
    draft: Draft, captures: Float[Array, "n a"], ids: Int[Array, " n1"], steps: int = 3, gap: int = 0
) -> dict[str, Array]:
    """Prefill of n rows (row i at position i holds token ids[i+1] and capture i), then `steps` greedy chain steps.

    Chain step j (1..steps) is fed the mapped argmax of the row before it and that row's feedback, at position n-1+j.
    `gap` plants a fault: it moves the positions of the chain by so many.
    """
    captures = np.asarray(captures, np.float64)
    n = len(captures)
    fused = draft.features(captures)
    hidden, cache = draft.step(ids[1:], fused, np.arange(n))
    out = {"fc_out": fused[None], "draft_hidden": hidden[None], "feedback": draft.feedback(hidden)[None]}
    out["draft_logits"] = draft.logits(hidden)[None]
    tokens, hiddens, logits, last = [], [], [draft.logits(hidden[-1:])], hidden[-1:]
    for j in range(1, steps + 1):
        tokens.append(draft.target_ids[np.argmax(logits[-1][0])])
        last, cache = draft.step(np.array(tokens[-1:]), draft.feedback(last), np.array([n - 1 + j + gap]), cache)
        hiddens.append(last[0])
        logits.append(draft.logits(last))
    out |= {"chain_tokens": np.array(tokens), "chain_hidden": np.array(hiddens)}
    return out | {"chain_logits": np.concatenate(logits[1:])}


def next_logprobs_after(
    draft: Draft, captures: Float[Array, "n a"], ids: Int[Array, " n1"]
) -> Callable[[tuple[int, ...]], Float[Array, " v"]]:
    """The callback of `tree_numpy.build_tree` for a draft after a prompt: log-probabilities over target ids.

    Every path is run by itself as a chain (paths share the keys and values of their common start), so a node sees
    exactly its ancestors and the prompt.
    """
    n = len(captures)
    hidden, cache = draft.step(ids[1:], draft.features(np.asarray(captures, np.float64)), np.arange(n))
    state: dict[tuple[int, ...], tuple[Array, Cache]] = {(): (hidden[-1:], cache)}

    def next_logprobs(path: tuple[int, ...]) -> Array:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in state:
                above, keys = state[path[: depth - 1]]
                token, position = np.array([path[depth - 1]]), np.array([n - 1 + depth])
                state[path[:depth]] = draft.step(token, draft.feedback(above), position, keys)
        logits = draft.logits(state[path][0])[0]
        shifted = logits - logits.max()
        full = np.full(len(draft.embed), -np.inf)
        full[draft.target_ids] = shifted - np.log(np.exp(shifted).sum())
        return full

    return next_logprobs


def with_layers(draft: Draft, change: Any) -> Draft:
    """The draft with `change(layer)` applied to every layer; for planting faults."""
    return replace(draft, layers=[change(layer) for layer in draft.layers])
