"""Products that are accumulated in float32 and differentiated in their operands' own dtype."""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from eaglejax.models.layers import PRECISION


def wide_einsum(spec: str, a: Shaped[Array, "..."], b: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """A product accumulated and returned in float32, whose gradients are products in the operands' own dtype.

    Left to autodiff, a bfloat16 product with a float32 result is differentiated in float32, off the matrix units.
    """
    return cast(Array, _wide_product(spec, a, b))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_product(spec, a, b):
    return jnp.einsum(spec, a, b, precision=PRECISION, preferred_element_type=jnp.float32)


def _wide_forward(spec, a, b):
    return _wide_product(spec, a, b), (a, b)


def _wide_backward(spec, operands, gradient):
    a, b = operands
    _, back = jax.vjp(partial(jnp.einsum, spec, precision=PRECISION), a, b)
    return back(gradient.astype(a.dtype))


_wide_product.defvjp(_wide_forward, _wide_backward)
