"""Meshes from text, and what is refused before anything is loaded."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from eaglejax.errors import ConfigError
from eaglejax.sharding.mesh import build_mesh, mesh_sizes


@pytest.mark.parametrize(
    ("text", "data", "model"),
    [("model=8", 1, 8), ("data=2,model=4", 2, 4), (" model = 4 , data=2", 2, 4), ("data=8", 8, 1)],
)
def test_text_names_the_axes(text, data, model):
    assert mesh_sizes(text) == {"data": data, "model": model}
    mesh = build_mesh(text)
    assert mesh is not None and dict(mesh.shape) == {"data": data, "model": model}


@pytest.mark.parametrize(
    "text", ["", "8", "model", "model=0", "model=-2", "tensor=8", "model=2,model=4", "model=2;data=4", "model=2,"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ConfigError, match="not a mesh"):
        build_mesh(text)


def test_more_devices_than_the_machine_has():
    with pytest.raises(ConfigError, match=r"a mesh of 64 devices, and there are 8 \(cpu\).*xla_force_host_platform"):
        build_mesh("model=64")


def test_an_own_mesh_is_brought_into_our_order():
    devices = np.asarray(jax.devices()).reshape(4, 2)
    mesh = build_mesh(Mesh(devices, ("model", "data")))
    assert mesh is not None and mesh.axis_names == ("data", "model") and mesh.devices.shape == (2, 4)
    assert (mesh.devices == devices.T).all()
    one = build_mesh(Mesh(np.asarray(jax.devices()), ("model",)))
    assert one is not None and dict(one.shape) == {"data": 1, "model": 8}
    with pytest.raises(ConfigError, match="unknown mesh axes"):
        build_mesh(Mesh(devices, ("x", "y")))


def test_other_kinds_are_refused():
    with pytest.raises(ConfigError, match="not a mesh"):
        build_mesh(8)
