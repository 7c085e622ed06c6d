"""The device mesh: axes "data" (slots are split over it) and "model" (weights are split over it).

In serving nothing ever crosses "data"; a train step sums its gradients over both.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from eaglejax.errors import ConfigError

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)
EXPECTED = '"model=8" or "data=2,model=4" (in Python also a jax.sharding.Mesh with these axes, or None)'


def mesh_sizes(text: str) -> dict[str, int]:
    """Devices along each axis, from text such as "data=2,model=4"; an axis that is not named has 1. Raises ConfigError."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    named: set[str] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part)
        name = match[1] if match else ""
        if match is None or name not in AXES or name in named or int(match[2]) < 1:
            raise ConfigError("not a mesh", where="mesh", found=repr(text), expected=EXPECTED)
        named.add(name)
        sizes[name] = int(match[2])
    return sizes


def build_mesh(asked: Any) -> Mesh | None:
    """The mesh that `mesh=` asks for, over the first devices of the machine; None for one device without a mesh.

    Raises ConfigError: not a mesh, or larger than the machine.
    """
    if asked is None:
        if jax.process_count() > 1:
            raise ConfigError(
                f"{jax.process_count()} processes need a mesh over all their devices",
                where="mesh",
                found="None",
                expected=f'for example "model={jax.device_count()}"',
            )
        return None
    if isinstance(asked, Mesh):
        return _own_mesh(asked)
    if not isinstance(asked, str):
        raise ConfigError("not a mesh", where="mesh", found=repr(asked)[:80], expected=EXPECTED)
    sizes = mesh_sizes(asked)
    count, devices = sizes[DATA] * sizes[MODEL], jax.devices()
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        exactly = "" if count > len(devices) else "; several processes use all of their devices"
        raise ConfigError(
            f"a mesh of {count} devices, and there are {len(devices)} ({devices[0].platform}){exactly}",
            where="mesh",
            found=repr(asked),
            fix=f"name a smaller mesh; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={count} makes {count}"
            if devices[0].platform == "cpu"
            else "name a smaller mesh",
        )
    shape = (sizes[DATA], sizes[MODEL])
    return Mesh(np.asarray(devices[:count]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 2)


def _own_mesh(mesh: Mesh) -> Mesh:
    if not set(mesh.axis_names) <= set(AXES):
        raise ConfigError("unknown mesh axes", where="mesh", found=mesh.axis_names, expected=AXES)
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    order = [mesh.axis_names.index(name) for name in AXES if name in sizes]
    devices = mesh.devices.transpose(order).reshape(sizes.get(DATA, 1), sizes.get(MODEL, 1))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


def axis_size(mesh: Mesh | None, axis: str) -> int:
    """Devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[axis]
