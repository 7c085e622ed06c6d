"""The target model: embedding, decoder blocks with captured boundaries, head."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from eaglejax.models.block import Block
from eaglejax.models.config import TargetConfig
from eaglejax.models.layers import Embedding, Linear, RMSNorm, project
from eaglejax.models.rows import KVRows, Step, empty_rows
from eaglejax.models.split import UNSPLIT, ModelSplit
from eaglejax.models.traced_once import traced_once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass gives."""

    hidden: Float[Array, "b t d"]  # boundary L: the residual stream after the last block, before the final norm
    normed: Float[Array, "b t d"] | None  # after it, where the last block made it in the same kernel
    captured: tuple[Float[Array, "b t d"], ...]  # the boundaries asked for, in the order asked
    rows: list[KVRows]  # the t own rows of every layer, which the caller writes to its caches


class Target(nnx.Module):
    """A decoder-only language model of any family.

    Boundary b is the residual stream after b blocks: 0 is the embedding, `num_layers` is before the final norm.
    With tied embeddings `head` is None and the embedding array itself is the head.
    `config` is the whole model; where it is split over devices, every module holds one device's part of its own.
    """

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, split: ModelSplit = UNSPLIT):
        self.config = config
        self.split = split
        self.dtype = jnp.dtype(dtype)
        size = config.hidden_size
        self.embedding = Embedding(config.vocab_size, size, dtype=dtype, over=split.vocab)
        self.layers = nnx.List(
            [
                Block(layer, size, config.norm_eps, dtype=dtype, split=split.layer(index))
                for index, layer in enumerate(config.layers)
            ]
        )
        self.norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        head = lambda: Linear(size, split.vocab.part(config.vocab_size), axes=("v", "d"), dtype=dtype, over=split.vocab)
        self.head = None if config.tie_embeddings else head()

    def __call__(
        self, tokens: Int[Array, "b t"], step: Step, caches: list[KVRows], boundaries: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Runs the t rows of `step` over the caches, one per layer, which are read and not written.

        Arguments:
            boundaries: which residual streams to return, each from 0 to `num_layers`, in any order.
        """
        with jax.named_scope("target"):
            with jax.named_scope("embedding"):
                x = self.embedding(tokens)
            wanted, rows = {0: x}, []
            norms, normed = [*(layer.input_norm for layer in self.layers), self.norm], None
            for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
                with jax.named_scope(f"layer_{index}"):
                    scale = norms[index + 1].scale[...]
                    x, normed, own = traced_once(layer, x, step, cache, normed=normed, next_scale=scale)
                wanted[index + 1] = x
                rows.append(own)
            return TargetOutput(x, normed, tuple(wanted[boundary] for boundary in boundaries), rows)

    def logits(
        self, hidden: Float[Array, "*lead d"], normed: Float[Array, "*lead d"] | None = None
    ) -> Float[Array, "*lead v"]:
        """Final norm and head of boundary `num_layers`; accumulated in float32 and not rounded.

        Arguments:
            normed: the final norm of `hidden`, where it is there already.

        Where the vocabulary is split (`split.vocab`) these are the logits of this device's part of it.
        """
        with jax.named_scope("head"):
            weight = self.embedding.weight if self.head is None else self.head.weight
            return project(self.norm(hidden) if normed is None else normed, weight[...], jnp.float32)

    def empty_caches(self, batch: int, rows: int) -> list[KVRows]:
        """One cache of zeros per layer, [batch, rows, ...]."""
        return [empty_rows(layer.attention.config, batch, rows, self.dtype) for layer in self.layers]
