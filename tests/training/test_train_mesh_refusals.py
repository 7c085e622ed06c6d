"""Meshes that training cannot have are refused before a file is read or anything compiled."""

import jax
import pytest
from small_run import settings

from eaglejax.errors import ConfigError
from eaglejax.training import memory, run
from eaglejax.training.identity import check_same_run
from eaglejax.training.train_config import FREE


@pytest.fixture
def nothing_loaded(monkeypatch):
    def load(*given, **named):
        raise AssertionError("loaded")

    monkeypatch.setattr(run, "load_pair", load)


def refused(out, data, **changes):
    none = out / "none.jsonl"
    with pytest.raises(ConfigError) as error:
        run.train(settings(out / "run", data, (none, none), **changes))
    assert not (out / "run").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(mesh="data=4,model=2", batch=6),
            "batch: the rows of a batch do not divide over the data axis of the mesh; found 6 rows on data=4,model=2; "
            "expected a multiple of 4; another batch, or a mesh with fewer devices along data",
        ),
        (dict(mesh="tensor=2"), 'mesh: not a mesh; found \'tensor=2\'; expected "model=8" or "data=2,model=4"'),
        (dict(mesh="data=2;model=2"), "mesh: not a mesh; found 'data=2;model=2'"),
        (
            dict(mesh="data=2,model=32"),
            "mesh: a mesh of 64 devices, and there are 8 (cpu); found 'data=2,model=32'; name a smaller mesh; on a CPU, XLA_FLAGS=",
        ),
    ],
)
def test_impossible_meshes(tmp_path, data, nothing_loaded, changes, message):
    assert message in refused(tmp_path, data, **changes)


@pytest.mark.parametrize("mesh", [None, "model=8"])
def test_several_processes(tmp_path, data, nothing_loaded, monkeypatch, mesh):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = "mesh: training runs in one process; found 2 processes; expected one process that has all devices"
    assert message in refused(tmp_path, data, mesh=mesh)


def test_a_mesh_may_change_between_stop_and_resume(tmp_path, data):
    """Also beside checkpoints that were written when a mesh was a setting of the run."""
    none = tmp_path / "none.jsonl"
    one, other = (settings(tmp_path, data, (none, none), mesh=mesh) for mesh in (None, "data=2"))
    assert "mesh" in FREE and one.binding() == other.binding()
    check_same_run({**one.binding(), "mesh": None}, other.binding(), "here")


class Device:
    """A device with so many bytes free, or one that does not tell."""

    platform = "gpu"

    def __init__(self, free):
        self.free = free

    def memory_stats(self):
        return None if self.free is None else {"bytes_limit": self.free + 7, "bytes_in_use": 7}


class Compiled:
    """A program that takes 100 bytes beside its arguments on each device."""

    temp_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 90, 30, 20

    def memory_analysis(self):
        return self


@pytest.mark.parametrize(("free", "fits"), [((500, 100, 500), True), ((500, 99, 500), False), ((99, None), True)])
def test_the_device_with_least_memory_decides(monkeypatch, free, fits):
    monkeypatch.setattr(memory, "local_devices", lambda mesh: [Device(each) for each in free])
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if fits:
        assert memory.check_fits(Compiled(), 4, 16, mesh) == 100
        return
    with pytest.raises(
        ConfigError, match=r"beside weights and text on each device; .* a mesh with more devices along data"
    ):
        memory.check_fits(Compiled(), 4, 16, mesh)
