"""The shape of a draft for a given target: one layer as wide as the target, in SafeAILab's layout."""

from __future__ import annotations

import math

from eaglejax.errors import ConfigError
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig, RopeConfig, TargetConfig


def usual_boundaries(target: TargetConfig) -> tuple[int, ...]:
    """EAGLE-3's captures: 2, L // 2, L - 3. Raises ConfigError where these are not three in ascending order."""
    layers = target.num_layers
    found = (2, layers // 2, layers - 3)
    if not found[0] < found[1] < found[2]:
        raise ConfigError(
            "a target of few layers has no usual captures",
            where="boundaries",
            found=f"{layers} layers",
            fix=f"name three boundaries of 0..{layers}",
        )
    return found


def draft_shape(
    target: TargetConfig,
    vocabulary: int,
    mlp: int,
    *,
    own_head: bool = True,
    boundaries: tuple[int, ...] | None = None,
) -> DraftConfig:
    """A one-layer draft.

    Arguments:
        vocabulary: draft vocabulary. mlp: width of the draft's MLP.
        own_head: False borrows the target's rows, which then cost nothing in the draft's file and are not trained.

    Heads, their width and the RoPE base are those of the target's first layer; its biases, norms, window and RoPE
    scaling are left out, which the layout does not know. Beside a target with latent attention: heads of 128, up to 8
    of keys and values.

    Raises ConfigError for a vocabulary larger than the target's.
    """
    if not 0 < vocabulary <= target.vocab_size:
        raise ConfigError(
            "must lie within the target's vocabulary",
            where="draft_vocab_size",
            found=vocabulary,
            expected=f"1..{target.vocab_size}",
        )
    return DraftConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        boundaries=usual_boundaries(target) if boundaries is None else boundaries,
        layers=(LayerConfig(_attention(target), DenseConfig(mlp)),),
        norm_eps=target.norm_eps,
        own_head=own_head,
        max_position=target.max_position,
    )


def _attention(target: TargetConfig) -> GQAConfig:
    theirs = target.layers[0].attention
    if isinstance(theirs, GQAConfig):
        rope = RopeConfig(theirs.rope.theta, theirs.head_dim)
        return GQAConfig(theirs.heads, theirs.kv_heads, theirs.head_dim, rope)
    heads = max(1, target.hidden_size // 128)
    head_dim = min(128, target.hidden_size)
    return GQAConfig(heads, math.gcd(heads, 8), head_dim, RopeConfig(theirs.rope.theta, head_dim))
