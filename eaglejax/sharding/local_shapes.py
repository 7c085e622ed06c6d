"""The weights of one device of a mesh, as shapes, by the rules that the engine itself is built with (`sharding/rules.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from eaglejax.models.config import DenseConfig, DraftConfig, LayerConfig, TargetConfig
from eaglejax.models.draft import Draft
from eaglejax.models.packed import Packing, pack
from eaglejax.models.split import LayerSplit, ModelSplit, local_attention, local_dense, local_experts
from eaglejax.models.target import Target
from eaglejax.sharding.rules import ExpertSplit, Placement, split_draft, split_target

Config = TypeVar("Config", TargetConfig, DraftConfig)


@dataclass(frozen=True)
class Leaf:
    """One array of weights of one device: its dotted path, its shape there, and the bytes of an element."""

    path: str
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class LocalModel:
    """A model's part on one device.

    `config`: with heads, widths, experts and vocabularies of that part. `split`: how it is split. `module`: the part itself, abstract.
    `notes`: what stays whole, in words. `summed`: per layer, how many of its two halves (attention, MLP) end in an all-reduce.
    """

    config: TargetConfig | DraftConfig
    split: ModelSplit
    module: Target | Draft
    notes: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Its weights, the draft's table of target ids among them."""
        flat = nnx.to_flat_state(nnx.state(self.module))
        shown = lambda path: ".".join(str(part) for part in path)
        return tuple(
            Leaf(shown(path), tuple(value.shape), jnp.dtype(value.dtype).itemsize)
            for path, value in flat
            if jnp.issubdtype(value.dtype, jnp.number)
        )

    @property
    def summed(self) -> tuple[int, ...]:
        layers = [self.split.layer(index) for index in range(len(self.config.layers))]
        return tuple(_sums(layer) for layer in layers)

    @property
    def vocab_split(self) -> bool:
        return self.split.vocab.axis is not None

    @property
    def draft_vocab_split(self) -> bool:
        return self.split.draft_vocab.axis is not None

    @property
    def fusion_split(self) -> bool:
        return self.split.fusion.axis is not None


def local_target(
    config: TargetConfig,
    devices: int,
    dtype: DTypeLike,
    experts: ExpertSplit = "auto",
    packings: Mapping[str, Packing] | None = None,
) -> LocalModel:
    """The target's part on one of `devices` devices of the model axis.

    Arguments:
        experts: as in `Placement`.
        packings: of the weights that are packed there, by the path of the plain one.
    """
    notes: list[str] = []
    split = split_target(config, devices, Placement(experts), notes)

    def build() -> Target:
        target = Target(config, dtype=dtype, split=split)
        pack(target, packings or {})
        return target

    return LocalModel(local_config(config, split), split, nnx.eval_shape(build), tuple(notes))


def local_draft(config: DraftConfig, devices: int, dtype: DTypeLike) -> LocalModel:
    """The draft's part on one of `devices` devices; 1 for a replicated draft."""
    notes: list[str] = []
    split = split_draft(config, devices, Placement(draft="sharded"), notes)
    module = nnx.eval_shape(lambda: Draft(config, dtype=dtype, split=split))
    return LocalModel(local_config(config, split), split, module, tuple(notes))


def local_config(config: Config, split: ModelSplit) -> Config:
    """The config of one device's part: its heads, widths, experts and vocabularies."""
    changes: dict[str, Any] = dict(layers=_layers(config.layers, split), vocab_size=split.vocab.part(config.vocab_size))
    if isinstance(config, DraftConfig):
        changes["draft_vocab_size"] = split.draft_vocab.part(config.draft_vocab_size)
    return replace(config, **changes)


def _layers(layers: tuple[LayerConfig, ...], split: ModelSplit) -> tuple[LayerConfig, ...]:
    made = []
    for index, layer in enumerate(layers):
        over = split.layer(index)
        attention = local_attention(layer.attention, over.attention)  # pyright: ignore[reportArgumentType]
        if isinstance(layer.mlp, DenseConfig):
            mlp = local_dense(layer.mlp, over.mlp)
        else:
            mlp = replace(local_experts(layer.mlp, over.mlp), shared_width=over.shared.part(layer.mlp.shared_width))
        made.append(LayerConfig(attention, mlp))
    return tuple(made)


def _sums(split: LayerSplit) -> int:
    """All-reduces of a layer: one after attention, one after the MLP; routed and shared experts share theirs where both are split."""
    return (split.attention.axis is not None) + (split.mlp.axis is not None or split.shared.axis is not None)
