"""Trial 40, refusals: what cannot fit is refused with bytes needed and free before a weight is read; what fits never is."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from eaglejax import Speculation
from eaglejax.checkpoint import streaming
from eaglejax.errors import ConfigError
from eaglejax.sharding import fit

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import pairs  # noqa: E402

SPEC = Speculation(3, 2, 8)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def folders(request, tmp_path_factory):
    return pairs.write_random(tmp_path_factory.mktemp(request.param), request.param)


def needs_seen(monkeypatch) -> list[fit.Needs]:
    seen, check = [], fit.check_fit

    def watched(needs, *rest):
        seen.append(needs)
        check(needs, *rest)

    monkeypatch.setattr("eaglejax.loading.check_fit", watched)
    return seen


def state_bytes(engine, spec) -> int:
    """Bytes of the state on one device, from the shapes of the engine's own program."""
    programs = engine._programs_for(spec)
    with pairs.jaxtyping_off():
        leaves = jax.tree.leaves(programs.state_shapes(engine.slots))
    local = lambda leaf: leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return sum(leaf.dtype.itemsize * _count(local(leaf)) for leaf in leaves)


def _count(shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def weight_bytes(engine) -> int:
    """Bytes of the distinct arrays of weights on the first device."""
    device, buffers = jax.devices()[0], {}
    for array in jax.tree.leaves(engine._programs_for(SPEC).arrays):
        if jax.numpy.issubdtype(array.dtype, jax.numpy.number):
            for shard in array.addressable_shards:
                if shard.device == device:
                    buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


@pytest.mark.parametrize(
    ("mesh", "placement"),
    [(None, "replicated"), ("model=8", "replicated"), ("data=2,model=4", "sharded"), ("data=8", "replicated")],
)
def test_what_is_needed_is_what_is_held(folders, monkeypatch, mesh, placement):
    seen = needs_seen(monkeypatch)
    engine = pairs.load(*folders, speculation=SPEC, mesh=mesh, draft_placement=placement, slots=8)
    (needs,) = seen
    assert needs.target + needs.draft == weight_bytes(engine)
    assert needs.state == state_bytes(engine, SPEC)
    assert f"{needs.held:,} bytes needed on each device" in str(engine.load_report)
    assert "free (this machine's memory" in str(engine.load_report)


def with_free(monkeypatch, *frees: int | None, devices: int = 1):
    """Memories with so many bytes free."""
    pools = [fit.Pool(f"gpu:{index}", devices, free) for index, free in enumerate(frees)]
    monkeypatch.setattr(fit, "pools_of", lambda _: pools)


def test_refused_to_the_byte_before_anything_is_read(folders, monkeypatch):
    seen = needs_seen(monkeypatch)
    monkeypatch.setattr(streaming, "read_leaf_block", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr("jax.jit", lambda *_, **__: pytest.fail("a program was made"))
    monkeypatch.setattr("jax.device_put", lambda *_, **__: pytest.fail("something was allocated"))
    load = lambda **more: pairs.load(*folders, speculation=SPEC, slots=4, **more)
    with_free(monkeypatch, 0)
    with pytest.raises(ConfigError):
        load()
    needed = seen[0].held
    with_free(monkeypatch, needed, needed - 1, needed - 2)
    with pytest.raises(ConfigError) as refused:
        load()
    said = str(refused.value)
    assert (
        f"gpu:1: {needed:,} bytes needed, {needed - 1:,} free, gpu:2: {needed:,} bytes needed, {needed - 2:,} free"
        in said
    )
    assert "gpu:0" not in said and "max_len of at most 127 with as many slots" in said and "\n" not in said
    # the machine's memory is shared by the devices of a CPU
    with_free(monkeypatch, 2 * needed - 1, devices=2)
    with pytest.raises(ConfigError, match=f"gpu:0: {2 * needed:,} bytes needed for 2 devices, {2 * needed - 1:,} free"):
        load()
    # weights alone
    with_free(monkeypatch, seen[0].target)
    with pytest.raises(ConfigError, match="a mesh with more devices along model, or dtype bfloat16"):
        load()


def test_what_just_fits_is_loaded_and_warned_about(folders, monkeypatch):
    seen = needs_seen(monkeypatch)
    with_free(monkeypatch, 1 << 40)
    assert not pairs.load(*folders, speculation=SPEC).load_report.warnings
    with_free(monkeypatch, seen[0].held)
    engine = pairs.load(*folders, speculation=SPEC)
    assert "with what programs need beside them they may not" in engine.load_report.warnings[0]
    with_free(monkeypatch, None)
    assert "free memory is not told here: not checked" in str(pairs.load(*folders, speculation=SPEC).load_report)


def test_slots_beyond_this_machine_are_refused(folders):
    """The real reading of the machine's memory, and a max_len that is cut to the target's context first."""
    with pytest.raises(ConfigError, match=r"this machine's memory: [\d,]+ bytes needed, [\d,]+ free"):
        pairs.load(*folders, slots=100_000_000)
    pairs.load(*folders, max_len=10**12)


def test_an_engine_that_nobody_uses_is_let_go_first(folders, monkeypatch):
    seen = needs_seen(monkeypatch)
    looks = []

    def look(_):
        looks.append(1)
        return [fit.Pool("gpu:0", 1, 0 if len(looks) == 1 else 1 << 40)]

    monkeypatch.setattr(fit, "pools_of", look)
    pairs.load(*folders, speculation=SPEC)
    assert seen and len(looks) == 2


def test_free_bytes_of_devices(tmp_path, monkeypatch):
    device = lambda platform, stats: SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    full = device("gpu", {"bytes_limit": 1000, "bytes_in_use": 300})
    assert fit.device_free(full) == 700
    assert fit.device_free(device("gpu", None)) is None and fit.device_free(device("gpu", {"bytes_in_use": 3})) is None
    text = tmp_path / "meminfo"
    text.write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  40 kB\n")
    monkeypatch.setattr(fit, "MEMORY_FILE", text)
    host = device("cpu", None)
    pools = fit.pools_of([host, full, host])
    assert [(pool.devices, pool.free) for pool in pools] == [(1, 700), (2, 40 * 1024)]
    text.write_text("nothing")
    assert fit.machine_free() is None
    monkeypatch.setattr(fit, "MEMORY_FILE", tmp_path / "none")
    assert fit.machine_free() is None


def test_all_processes_refuse_where_one_is_short(folders, monkeypatch):
    seen = needs_seen(monkeypatch)
    pairs.load(*folders, speculation=SPEC)
    monkeypatch.setattr(fit, "from_all", lambda what, own: [own, "gpu:9: 7 bytes needed, 3 free"])
    with pytest.raises(ConfigError, match="found gpu:9: 7 bytes needed, 3 free$"):
        fit.check_fit(seen[0], None, fit.LoadReport())


def test_longest_is_the_last_that_fits(folders, monkeypatch):
    seen = needs_seen(monkeypatch)
    pairs.load(*folders, speculation=SPEC)
    needs = seen[0]
    at = lambda length: replace(needs, sizes=replace(needs.sizes, max_len=length)).held
    assert needs.longest(at(50)) == 50 and needs.longest(at(50) - 1) == 49
    assert needs.longest(needs.target) == 0 and needs.longest(1 << 60) == needs.sizes.max_len
