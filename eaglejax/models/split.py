"""How a model's work is split over the devices of a mesh axis: which dims of which weights, and where partial results are summed.

Every module is built for ONE device: its weights are that device's part and it runs inside `jax.shard_map`. What a module needs to know
is here; which parts are split, and how that is decided, is `sharding/rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, Int, Shaped

from eaglejax.models.config import DenseConfig, GQAConfig, MLAConfig, MoEConfig

Attention = TypeVar("Attention", GQAConfig, MLAConfig)


@dataclass(frozen=True)
class Over:
    """One part of a model (attention, an MLP, experts, a vocabulary) split over mesh axis `axis`; whole on every device where that is None.

    `names`: the logical axes of its weights that are split. `size`: devices along the axis.
    `repeat`: devices that share one KV head, where there are fewer KV heads than devices.
    """

    axis: str | None = None
    names: tuple[str, ...] = ()
    size: int = 1
    repeat: int = 1

    def mesh_axes(self, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """The mesh axis of each dim of a weight with these logical axes."""
        return tuple(self.axis if name in self.names else None for name in axes)

    def repeats(self, axes: tuple[str | None, ...]) -> tuple[int, ...]:
        """How many neighbouring devices hold the same part of each dim."""
        return tuple(self.repeat if name == "k" else 1 for name in axes)

    def part(self, count: int) -> int:
        """One device's share of `count`."""
        assert count % self.size == 0, (count, self)
        return count // self.size

    def sum(self, partial: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        """The sum over the devices of what each computed from its part."""
        if self.axis is None:
            return partial
        with jax.named_scope("all_reduce"):
            return lax.psum(partial, self.axis)

    def max(self, own: Shaped[Array, "*n"]) -> Shaped[Array, "*n"]:
        """The elementwise maximum over the devices."""
        return own if self.axis is None else lax.pmax(own, self.axis)

    def gather(self, own: Shaped[Array, "*n"]) -> Shaped[Array, "p *n"]:
        """Every device's array along a new first axis, in the order of the parts."""
        return own[None] if self.axis is None else lax.all_gather(own, self.axis)

    def first(self, own: int) -> Int[Array, ""] | int:
        """Where this device's part of `own` entries begins."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * own


WHOLE = Over()


def local_attention(config: Attention, over: Over) -> Attention:
    """The heads of one device; at least one KV head each."""
    heads = over.part(config.heads)
    if isinstance(config, GQAConfig):
        return replace(config, heads=heads, kv_heads=max(1, config.kv_heads // over.size))
    return replace(config, heads=heads)


def local_dense(config: DenseConfig, over: Over) -> DenseConfig:
    """The width of one device."""
    return replace(config, width=over.part(config.width))


def local_experts(config: MoEConfig, over: Over) -> MoEConfig:
    """The experts of one device (axis "e"), or its part of the width of all (axis "f")."""
    if "e" in over.names:
        return replace(config, experts=over.part(config.experts))
    return replace(config, width=over.part(config.width))


@dataclass(frozen=True)
class LayerSplit:
    """How one decoder block is split; `shared` are the shared experts of a mixture."""

    attention: Over = WHOLE
    mlp: Over = WHOLE
    shared: Over = WHOLE


@dataclass(frozen=True)
class ModelSplit:
    """How a target or a draft is split; `layers` has one entry per layer, or none where every layer is whole.

    `vocab`: embedding and head. `draft_vocab`: a draft's head. `fusion`: a draft's fc, along what it reads.
    """

    layers: tuple[LayerSplit, ...] = ()
    vocab: Over = WHOLE
    draft_vocab: Over = WHOLE
    fusion: Over = WHOLE

    def layer(self, index: int) -> LayerSplit:
        return self.layers[index] if self.layers else LayerSplit()


UNSPLIT = ModelSplit()
