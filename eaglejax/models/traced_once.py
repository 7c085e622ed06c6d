"""One trace for all layers of a kind: of sixty alike layers one is traced and lowered for each shape of its arguments, not sixty."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from eaglejax.models.moe import watched


def traced_once(layer: nnx.Module, *arguments: Any, **named: Any) -> Any:
    """layer(*arguments, **named) inside a program that is being traced.

    jax keeps the trace by the layer's structure and the shapes, also for other programs; XLA inlines the call. What a trace hands out on
    the side (`moe.watching_routers`) would come once and not for every layer, so then all are traced.
    """
    if watched() is not None:
        return layer(*arguments, **named)
    return _run(*nnx.split(layer), arguments, named)


@partial(jax.jit, static_argnums=0)
def _run(graph, state, arguments, named):
    return nnx.merge(graph, state)(*arguments, **named)
