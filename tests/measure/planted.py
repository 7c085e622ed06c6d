"""A known heavy operation in the draft: its MLP, and beside it a chain of products whose time can be measured alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from eaglejax.measure.timing import Spread, seconds

WIDTH, PRODUCTS = 256, 16


def products(weight: jax.Array, seed: jax.Array) -> jax.Array:
    """`PRODUCTS` products of square matrices, one after another."""
    return lax.fori_loop(0, PRODUCTS, lambda _, y: weight @ y, jnp.full((WIDTH, WIDTH), seed))[0, 0]


def seconds_alone() -> float:
    """Median of the products outside of any model."""
    run, weight = jax.jit(products), weights()
    return Spread.of([seconds(lambda: run(weight, jnp.float32(1))) for _ in range(8)][1:]).median


def weights() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32))


class Planted(nnx.Module):
    """`inner`, and the products beside it: they wait for its result, and add nothing to it in a way that XLA cannot see."""

    def __init__(self, inner: nnx.Module):
        self.inner = inner
        self.weight = nnx.Param(weights())

    def __call__(self, x):
        out = self.inner(x)  # pyright: ignore
        return out + 0 * products(self.weight[...], out.reshape(-1)[0])


def plant(engine) -> None:
    """In the draft of an engine that has not compiled anything yet."""
    first = engine._pair.draft.first
    first.mlp = Planted(first.mlp)
