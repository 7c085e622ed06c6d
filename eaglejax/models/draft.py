"""The EAGLE-3 draft (arXiv:2503.01840): a small decoder that reads the target's captured states and proposes the next
tokens.

    g      = fc(captures)                            once per position the target has seen; not for the draft's own
    states first  : attention over [norm(embed(token)), hidden_norm(g)], added to g; then the gated MLP
    others : ordinary decoder blocks
    logits = head(norm(h)); h itself (or norm(h), EAGLE-3.1) takes the place of g one step deeper

Every variant of the released formats is data in `DraftConfig`; nothing here knows a format's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from eaglejax.kernels.row_kernels import add_norm
from eaglejax.models.block import Block, build_attention
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig
from eaglejax.models.layers import MLP, Embedding, Linear, RMSNorm, project
from eaglejax.models.rows import KVRows, Step, empty_rows
from eaglejax.models.split import UNSPLIT, WHOLE, LayerSplit, ModelSplit, Over
from eaglejax.models.traced_once import traced_once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftOutput:
    """What one forward pass of the draft gives for its t rows."""

    hidden: Float[Array, "b t d"]  # before the final norm; `Draft.logits` takes this
    feedback: Float[Array, "b t d"]  # what the next drafting step is fed as its hidden state
    rows: list[KVRows]  # one per layer: the t rows' own keys and values


class Fusion(nnx.Module):
    """The captures joined low to high, [n * dt] wide, brought to the draft's width: optional norms, then fc.

    Split `over` devices, each multiplies its part of the captures.
    """

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, over: Over = WHOLE):
        wide = config.captures * config.target_hidden_size
        one = config.target_hidden_size
        self.captures = config.captures
        eps = config.target_norm_eps
        self.target_norm = None if eps is None else RMSNorm(one, eps, dtype=dtype, axes=(None,))
        self.joint_norm = RMSNorm(wide, config.norm_eps, dtype=dtype, axes=(None,)) if config.norm_before_fc else None
        each = range(config.captures if config.fc_norm else 0)
        self.capture_norms = nnx.List([RMSNorm(one, config.norm_eps, dtype=dtype, axes=(None,)) for _ in each])
        self.over = over
        fc = lambda: Linear(
            over.part(wide),
            config.hidden_size,
            axes=("d", "n"),
            dtype=dtype,
            use_bias=config.fc_bias,
            over=over,
            summed=over,
        )
        self.fc = fc() if config.fc else None

    def __call__(self, features: Float[Array, "b t n"]) -> Float[Array, "b t d"]:
        if self.target_norm is not None:
            features = self.target_norm(features)
        if self.joint_norm is not None:
            features = self.joint_norm(features)
        if len(self.capture_norms):
            parts = jnp.split(features, self.captures, axis=-1)
            features = jnp.concatenate(
                [norm(part) for norm, part in zip(self.capture_norms, parts, strict=True)], axis=-1
            )
        if self.fc is None:
            return features
        if self.over.axis is not None:
            part = self.over.part(features.shape[-1])
            features = lax.dynamic_slice_in_dim(features, self.over.first(part), part, axis=-1)
        return self.fc(features)


class FirstLayer(nnx.Module):
    """The draft's first layer: attention reads token embedding and hidden state side by side, embedding first."""

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, split: LayerSplit | None = None):
        split = split or LayerSplit()
        width, eps = config.hidden_size, config.norm_eps
        layer = config.layers[0]
        assert isinstance(layer.mlp, DenseConfig), "experts in a draft are refused when its config is read"
        self.input_norm = RMSNorm(width, eps, dtype=dtype) if config.input_norm else None
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype) if config.hidden_norm else None
        self.attention = build_attention(layer.attention, 2 * width, width, dtype=dtype, over=split.attention)
        self.post_norm = RMSNorm(width, eps, dtype=dtype)
        self.mlp = MLP(layer.mlp, width, dtype=dtype, over=split.mlp)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "b t d"],
        hidden: Float[Array, "b t d"],
        step: Step,
        cache: KVRows,
        earlier: KVRows | None = None,
    ) -> tuple[Float[Array, "b t d"], KVRows]:
        if self.input_norm is not None:
            embedded = self.input_norm(embedded)
        normed = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
        stream = normed if self.norm_before_residual else hidden
        mixed, rows = self.attention(jnp.concatenate([embedded, normed], axis=-1), step, cache, earlier)
        stream, normed = add_norm(stream, mixed, self.post_norm.scale[...], self.post_norm.eps)
        return stream + self.mlp(normed), rows


class Draft(nnx.Module):
    """An EAGLE-3 draft.

    Build it abstract, then fill every leaf (`checkpoint/draft_loader.py`). A borrowed embedding or head is the
    target's own array. `target_ids` [w] holds the target id of every draft id (draft id + d2t), so that nothing
    downstream sees offsets.
    """

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, split: ModelSplit = UNSPLIT):
        width = config.hidden_size
        self.config = config
        self.split = split
        self.dtype = jnp.dtype(dtype)
        self.embedding = Embedding(config.vocab_size, width, dtype=dtype, over=split.vocab)
        self.fusion = Fusion(config, dtype=dtype, over=split.fusion)
        self.first = FirstLayer(config, dtype=dtype, split=split.layer(0))
        self.others = nnx.List(
            [
                Block(layer, width, config.norm_eps, dtype=dtype, split=split.layer(index))
                for index, layer in enumerate(config.layers[1:], 1)
            ]
        )
        self.norm = RMSNorm(width, config.norm_eps, dtype=dtype) if config.final_norm else None
        own = split.draft_vocab.part(config.draft_vocab_size)
        self.head = Linear(width, own, axes=("w", "d"), dtype=dtype, over=split.draft_vocab)
        self.target_ids = nnx.Variable(jnp.zeros((config.draft_vocab_size,), jnp.int32))

    def fuse(self, features: Float[Array, "b t n"]) -> Float[Array, "b t d"]:
        """Captured states, joined in the order of the boundaries, to the first hidden state of each position."""
        with jax.named_scope("draft_fuse"):
            return self.fusion(features.astype(self.dtype))

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        hidden: Float[Array, "b t d"],
        step: Step,
        caches: list[KVRows],
        earlier: list[KVRows] | None = None,
    ) -> DraftOutput:
        """Row i pairs token i (a target id) with the hidden state of the position before it.

        `hidden` is `fuse` of the target's captures where the target has been, and the parent's `feedback` deeper in a
        tree. `earlier` are the step rows before these (levels of the same tree), one KVRows per layer. Nothing is
        written to the caches.
        """
        with jax.named_scope("draft"):
            before = earlier or [None] * len(caches)
            embedded = self.embedding(tokens).astype(self.dtype)
            x, own = traced_once(self.first, embedded, hidden.astype(self.dtype), step, caches[0], before[0])
            rows = [own]
            for block, cache, previous in zip(self.others, caches[1:], before[1:], strict=True):
                x, _, own = traced_once(block, x, step, cache, previous)
                rows.append(own)
            feedback = self.norm(x) if self.norm is not None and self.config.norm_output else x
            return DraftOutput(x, feedback, rows)

    def logits(self, hidden: Float[Array, "*lead d"]) -> Float[Array, "*lead w"]:
        """Scores over the draft vocabulary, accumulated in float32; entry i belongs to target id `target_ids[i]`.

        Where the vocabulary is split (`split.draft_vocab`) these are the scores of this device's part of it.
        """
        with jax.named_scope("draft_head"):
            normed = hidden if self.norm is None else self.norm(hidden)
            weight = self.head.weight[...]
            return project(normed.astype(weight.dtype), weight, jnp.float32)

    def empty_caches(self, batch: int, rows: int) -> list[KVRows]:
        """One cache of zeros per layer, for `rows` positions of `batch` slots."""
        return [empty_rows(layer.attention.config, batch, rows, self.dtype) for layer in (self.first, *self.others)]


def layer_attention(layer: LayerConfig) -> str:
    """How a layer attends, in words, for the load report."""
    if isinstance(layer.attention, GQAConfig):
        a = layer.attention
        window = "" if a.window is None else f", window {a.window}"
        return f"{a.heads} heads over {a.kv_heads}, head_dim {a.head_dim}{window}"
    a = layer.attention
    return f"latent attention, {a.heads} heads, kv rank {a.kv_lora_rank} + rope {a.rope_dim}"
