"""Where and with what a measurement was made: a figure without this is none."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import jax

from eaglejax.loading import Pair
from eaglejax.sharding.fit import local_devices
from eaglejax.sharding.mesh import DATA, MODEL, axis_size

PACKAGES = ("eaglejax", "jax", "jaxlib", "flax", "numpy")


def describe_environment(pair: Pair) -> dict[str, Any]:
    """Devices, mesh, dtype and versions, by name. `cores` is told for a CPU alone."""
    device = local_devices(pair.mesh)[0]
    return {
        "model": pair.name,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "devices": 1 if pair.mesh is None else pair.mesh.size,
        "cores": usable_cores() if device.platform == "cpu" else None,
        "mesh": None if pair.mesh is None else {axis: axis_size(pair.mesh, axis) for axis in (DATA, MODEL)},
        "dtype": pair.dtype.name,
        "xla_flags": os.environ.get("XLA_FLAGS") or None,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def environment_line(values: dict[str, Any]) -> str:
    """The same for people."""
    mesh = values["mesh"]
    where = f"{values['devices']} x {values['device_kind']}" + (
        f" ({values['cores']} cores)" if values["cores"] else ""
    )
    laid = "no mesh" if mesh is None else "mesh " + ",".join(f"{axis}={size}" for axis, size in mesh.items())
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    flags = f"; XLA_FLAGS {values['xla_flags']}" if values["xla_flags"] else ""
    return f"{where}, {values['platform']}; {values['dtype']}; {laid}; {versions}{flags}"


def usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(name: str) -> str:
    if name == "jax":
        return jax.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from a source tree
        return "not installed"
