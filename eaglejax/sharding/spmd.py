"""One program for all devices: what each holds of the loop's state, and running a function on every device's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from eaglejax.models.config import GQAConfig
from eaglejax.models.draft import Draft
from eaglejax.models.target import Target
from eaglejax.sharding.layout import Specs
from eaglejax.sharding.mesh import DATA
from eaglejax.speculation.adapt import Belief
from eaglejax.speculation.state import Models, Request, State


def cache_specs(model: Target | Draft) -> list[P]:
    """Specs of the caches' leaves: slots over the data axis, KV heads as the attention has them; a latent cache is whole everywhere."""
    layers = model.layers if isinstance(model, Target) else (model.first, *model.others)
    specs: list[P] = []
    for index, layer in enumerate(layers):
        if isinstance(layer.attention.config, GQAConfig):
            specs += [P(DATA, None, model.split.layer(index).attention.axis, None)] * 2
        else:
            specs.append(P(DATA))
    return specs


def state_specs(models: Models, adaptive: bool = False) -> list[P]:
    """Specs of the leaves of the loop's state: everything by slot over the data axis. `adaptive`: with what "auto" has learned."""
    specs: list[P] = []
    for field in fields(State):
        match field.name:
            case "request":
                specs += [P(DATA)] * len(fields(Request))
            case "target_cache":
                specs += cache_specs(models.target)
            case "draft_cache":
                specs += cache_specs(models.draft) if models.draft is not None else []
            case "belief":
                specs += [P(DATA)] * len(fields(Belief)) if adaptive else []
            case _:
                specs.append(P(DATA))
    return specs


def on_mesh(mesh: Mesh | None, function: Callable, in_specs: Sequence[Specs], out_specs: Specs, **jit: Any) -> Callable:
    """`function`, compiled; on a mesh every device runs it on its own parts of the arguments.

    Arguments:
        in_specs: for each argument the specs of its leaves, or one for all; static arguments come last and have none.
        out_specs: likewise for the result.
        jit: further arguments of `jax.jit`, by position of the argument.
    """
    if mesh is None:
        return jax.jit(function, **jit)

    def spread(*arguments):
        dynamic, fixed = arguments[: len(in_specs)], arguments[len(in_specs) :]
        # leaves rather than trees: a spec in the place of an array would not pass the records' type checks
        leaves, tree = jax.tree.flatten(dynamic)
        specs = [
            spec
            for argument, given in zip(dynamic, in_specs, strict=True)
            for spec in (given if isinstance(given, list) else [given] * len(jax.tree.leaves(argument)))
        ]
        made = []

        shapes = [leaf.shape for leaf in leaves]

        def run(*parts):
            parts = [_cut(part, shape) for part, shape in zip(parts, shapes, strict=True)]
            out, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, parts), *fixed))
            made[:] = [structure, [leaf.shape for leaf in out]]
            return [_filled(leaf) for leaf in out]

        # the parts are combined by collectives written in the models; jax need not track what differs between devices
        spread_over = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)
        out = spread_over(*map(_filled, leaves))
        return jax.tree.unflatten(made[0], [_cut(leaf, shape) for leaf, shape in zip(out, made[1], strict=True)])

    return jax.jit(spread, **jit)


# jax 0.11 dies (a segmentation fault, on the CPU) compiling a shard_map with an empty argument or result, such as the pending rows of
# plain decoding: across the border empty axes have length 1
def _filled(leaf: Array) -> Array:
    return leaf if leaf.size else jnp.zeros([max(n, 1) for n in leaf.shape], leaf.dtype)


def _cut(leaf: Array, like: tuple[int, ...]) -> Array:
    """Without the entries of axes that are empty in `like`."""
    return leaf if 0 not in like else leaf[tuple(slice(0, None if n else 0) for n in like)]
