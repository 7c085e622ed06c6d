"""From a device's part of an array to the whole and back: how weights are split, and moving arrays between host and devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

Specs = P | list[P]
EVERYWHERE = P()  # the same on all devices


def spec_of(variable: nnx.Variable) -> P:
    """How a weight is split: one mesh axis or None per dim; whole where it says nothing."""
    return P(*(variable.get_metadata().get("mesh_axes") or ()))


def whole_shape(variable: nnx.Variable, mesh: Mesh | None) -> tuple[int, ...]:
    """The shape of all devices' parts together."""
    axes = spec_of(variable)
    sizes = [1 if mesh is None or axis is None else mesh.shape[axis] for axis in axes]
    sizes += [1] * (len(variable.shape) - len(sizes))
    return tuple(part * size for part, size in zip(variable.shape, sizes, strict=True))


def weight_specs(state: Any) -> list[P]:
    """The spec of every weight of a module's `nnx.State`, in the order of the leaves."""
    return [spec_of(variable) for variable in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))]


def shapes_on(mesh: Mesh | None, tree: Any, specs: Specs) -> Any:
    """The arrays of a tree as shapes with their shardings."""
    leaves, structure = jax.tree.flatten(tree)
    given = specs if isinstance(specs, list) else [specs] * len(leaves)
    sharding = lambda spec: None if mesh is None else NamedSharding(mesh, spec)
    return jax.tree.unflatten(
        structure,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(spec))
            for leaf, spec in zip(leaves, given, strict=True)
        ],
    )


def place(value: Any, mesh: Mesh | None, spec: P = EVERYWHERE) -> Array:
    """A host array on the devices; every process gives the same value."""
    value = np.asarray(value)
    if mesh is None:
        return jax.numpy.asarray(value)
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def fetch(array: Array) -> Shaped[np.ndarray, "..."]:
    """The whole array on this host."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
