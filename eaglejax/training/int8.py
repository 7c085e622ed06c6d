"""Weights as an int8 export rounds them: for writing one, and for training towards it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

SHARES = np.linspace(0.7, 1.0, 16)  # of a row's largest value: what is brought to 127


def int8_rows(weight: Float[np.ndarray, "o i"]) -> tuple[Int8[np.ndarray, "o i"], Float[np.ndarray, "o 1"]]:
    """Symmetric int8 with one float32 factor per row.

    Of several factors up to the row's largest value over 127, the one with the least squared error is taken.
    """
    factor = np.asarray(_factors(np.asarray(weight, np.float32), np))
    return np.clip(np.rint(weight / factor), -127, 127).astype(np.int8), factor


def straight_through(weight: Float32[Array, "*lead i"]) -> Float32[Array, "*lead i"]:
    """The weight as `int8_rows` would write it, row by row of its last axis, with the gradient of the weight itself."""
    rows = lax.stop_gradient(weight).reshape(-1, weight.shape[-1])
    factor = _factors(rows, jnp)
    rounded = jnp.clip(jnp.rint(rows / factor), -127, 127) * factor
    return weight + (rounded.reshape(weight.shape) - lax.stop_gradient(weight))


def as_exported(weights: Mapping[str, Float32[Array, "..."]]) -> dict[str, Float32[Array, "..."]]:
    """Weights by parameter path: matrices as an int8 export holds them (`straight_through`), vectors as they are."""
    return {path: straight_through(weight) if weight.ndim > 1 else weight for path, weight in weights.items()}


def _factors(rows, xp: ModuleType) -> np.ndarray | jax.Array:
    """The factor of each row [o, 1]; numpy's arithmetic or jax's."""
    top = xp.maximum(xp.abs(rows).max(axis=1, keepdims=True), np.float32(1e-12))
    best_error, best_factor = xp.full(top.shape, np.inf, np.float32), top / 127
    for share in SHARES:
        factor = np.float32(share) * top / 127
        rounded = xp.clip(xp.rint(rows / factor), -127, 127) * factor
        error = ((rounded - rows) ** 2).sum(axis=1, keepdims=True)
        best_factor = xp.where(error < best_error, factor, best_factor)
        best_error = xp.minimum(error, best_error)
    return best_factor
