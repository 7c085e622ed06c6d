"""Compiled forward passes of a draft for tests: one program per shape instead of one per operation."""

import jax
import jax.numpy as jnp
from flax import nnx

from eaglejax.models.rows import causal_step


def compiled(draft):
    """A function (tokens, hidden, step, caches, earlier=None) -> (DraftOutput, logits)."""
    graph, arrays = nnx.split(draft)

    @jax.jit
    def run(arrays, *inputs):
        module = nnx.merge(graph, arrays)
        out = module(*inputs)
        return out, module.logits(out.hidden)

    return lambda tokens, hidden, step, caches, earlier=None: run(arrays, tokens, hidden, step, caches, earlier)


def fuse(draft, features):
    graph, arrays = nnx.split(draft)
    return jax.jit(lambda arrays, x: nnx.merge(graph, arrays).fuse(x))(arrays, jnp.asarray(features))


def teacher(draft):
    """A function (features, tokens) -> fused state, DraftOutput, logits; row i (token i, capture i) at position i."""
    graph, arrays = nnx.split(draft)

    @jax.jit
    def run(arrays, features, tokens):
        module = nnx.merge(graph, arrays)
        fused = module.fuse(features)
        step = causal_step(jnp.zeros((1,), jnp.int32), tokens.shape[1])
        out = module(tokens, fused, step, module.empty_caches(1, 0))
        return fused, out, module.logits(out.hidden)

    return lambda features, tokens: run(arrays, jnp.asarray(features), jnp.asarray(tokens, jnp.int32))


def from_scratch(draft, features, tokens):
    """`teacher`, once."""
    return teacher(draft)(features, tokens)
