"""What a model is, in our own words: frozen dataclasses that every family's config is turned into.

`families.py` reads a released config.json into these; the modules are built from them and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) with its scalings.

    `rotary_dim` channels of each head are rotated; `interleaved` pairs channels (2i, 2i+1) in place of (i, i +
    rotary_dim/2).
    `attention_factor` multiplies cos and sin (yarn, arXiv:2309.00071); None derives it from factor, mscale and
    mscale_all_dim.
    """

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention: `heads` query heads share `kv_heads` key/value heads of width `head_dim`."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    sinks: bool = False
    window: int | None = None


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), run absorbed over a cache of `kv_lora_rank` +
    `rope_dim`.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    norm_eps: float = 1e-6
    bias: bool = False


@dataclass(frozen=True)
class DenseConfig:
    """A gated MLP: down(act(gate(x)) * up(x))."""

    width: int
    bias: bool = False
    activation: str = "silu"


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts with the router arithmetic of one family, plus optional shared experts.

    `score`: "softmax" over all experts, "sigmoid", or "softmax_topk" (softmax over the chosen logits only, gpt-oss).
    `correction_bias`: added to the scores for choosing, never for weighting (DeepSeek-V3).
    `groups`, `topk_groups`: choose groups first, by the sum of the two best scores of each.
    `expert_activation`: "silu" or "gpt_oss" (clamped, alpha 1.702, up + 1).
    """

    experts: int
    topk: int
    width: int
    score: Literal["softmax", "sigmoid", "softmax_topk"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    expert_activation: Literal["silu", "gpt_oss"] = "silu"
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder block: pre-norm attention and pre-norm MLP, both on the residual stream."""

    attention: GQAConfig | MLAConfig
    mlp: DenseConfig | MoEConfig


@dataclass(frozen=True)
class TargetConfig:
    """A whole target model."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        """L, the number of blocks."""
        return len(self.layers)


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 draft (arXiv:2503.01840) in any of its released formats.

    `boundaries`: the captured residual streams, boundary b = after b blocks of the target, in the order in which fc
        reads them; empty only for a draft read without its target whose config does not name them. `captures`: how many
        fc joins.
    `fc`: whether a projection from the captures to `hidden_size` exists. `fc_bias`: with bias.
    `norm_before_residual`: the residual stream starts from hidden_norm(g) in place of g.
    `norm_before_fc`: one RMSNorm over the concatenated captures. `fc_norm`: one RMSNorm per capture.
    `target_norm_eps`: the captured state first passes the target's final norm (ModelOpt without auxiliary states), else
        None.
    `norm_output`: the state after the final norm is fed back to the next step (EAGLE-3.1).
    `input_norm`, `hidden_norm`: norms of the first layer's two inputs, token embedding and hidden state. `final_norm`:
    norm before the head.
    `layers`: the first reads [embedding, hidden] (2 x hidden_size wide), the others are ordinary decoder blocks.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    boundaries: tuple[int, ...]
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    fc: bool = True
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    input_norm: bool = True
    hidden_norm: bool = True
    final_norm: bool = True
    own_embedding: bool = False
    own_head: bool = True
    max_position: int = 0
    captures: int = 3
    target_norm_eps: float | None = None
