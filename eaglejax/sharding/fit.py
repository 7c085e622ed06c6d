"""Whether what an engine is asked to hold fits its devices: told before anything is allocated, and before a weight is read.

What decides is weights and the state of all slots that were asked for, though a wave of fewer requests holds less; temporaries are an
estimate and only warned about.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from eaglejax.config import Auto, Speculation
from eaglejax.errors import ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.packed import Packing
from eaglejax.sharding.local_shapes import LocalModel
from eaglejax.sharding.memory import Sizes, program_rows, state_bytes, temporary_bytes, total
from eaglejax.sharding.mesh import DATA, axis_size
from eaglejax.sharding.processes import from_all
from eaglejax.sharding.weights import weigh

SECTION = "memory"
MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True)
class Capacity:
    """What an engine is asked to hold beside its weights: a state of `slots` slots of `max_len` tokens, for the tree, or trees, `spec`."""

    spec: Speculation | Auto
    max_len: int
    slots: int


@dataclass(frozen=True)
class Needs:
    """Bytes of one device. `target`, `draft`: their weights, arrays that both use counted once. `sizes`: what caches, state and
    temporaries follow from. `dequantised`: the largest weight that is widened whole."""

    target: int
    draft: int
    sizes: Sizes
    dequantised: int

    @property
    def state(self) -> int:
        """Caches and the loop's other state, of all slots."""
        return total(state_bytes(self.sizes))

    @property
    def held(self) -> int:
        """Weights and state: what is held for sure."""
        return self.target + self.draft + self.state

    @property
    def temporaries(self) -> int:
        """Of the program that needs more; an estimate."""
        rows = program_rows(self.sizes).values()
        return max(total(temporary_bytes(self.sizes, each, self.dequantised)) for each in rows)

    def longest(self, free: int) -> int:
        """The largest max_len with which all slots still fit into `free` bytes; 0 where none does."""
        low, high = 0, self.sizes.max_len
        while low < high:
            middle = (low + high + 1) // 2
            fits = replace(self, sizes=replace(self.sizes, max_len=middle)).held <= free
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@dataclass(frozen=True)
class Pool:
    """Memory that `devices` devices of this process share. `free`: bytes, None where nothing tells."""

    name: str
    devices: int
    free: int | None


def needs_of(
    target: LocalModel,
    draft: LocalModel | None,
    shared: Collection[str],
    packings: Mapping[str, Packing],
    capacity: Capacity,
    itemsize: int,
    mesh: Mesh | None,
) -> Needs:
    """The bytes of each device of a mesh.

    Arguments:
        shared: weights of the draft, by path, that are arrays of the target, or of the draft a second time.
        packings: of the target's packed weights, by the path of the plain one.
        itemsize: bytes of the compute dtype.
    """
    weights = weigh(target.leaves, packings)
    packed = [w.values for w in weights if w.packed and w.component != "experts"]
    own = [leaf for leaf in draft.leaves if leaf.path not in shared] if draft is not None else []
    sizes = Sizes(
        target.config,  # pyright: ignore[reportArgumentType]
        draft.config if draft is not None else None,  # pyright: ignore[reportArgumentType]
        capacity.spec,
        -(-capacity.slots // axis_size(mesh, DATA)),
        capacity.max_len,
        itemsize,
        local_devices(mesh)[0].platform,
    )
    return Needs(
        sum(w.bytes for w in weights), sum(w.bytes for w in weigh(own)), sizes, max(packed, default=0) * itemsize
    )


def local_devices(mesh: Mesh | None) -> list[Any]:
    """The devices of this process that hold a part."""
    if mesh is not None:
        return list(mesh.local_devices)
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return [chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]]


def machine_free() -> int | None:
    """Bytes of main memory that can be had without swapping; None where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY_FILE.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def device_free(device: Any) -> int | None:
    """Bytes that the device's allocator may still give; None where it does not tell."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return max(0, limit - stats.get("bytes_in_use", 0)) if limit else None


def pools_of(devices: list[Any]) -> list[Pool]:
    """The memories behind the devices: CPU devices share the machine's."""
    host = [device for device in devices if device.platform == "cpu"]
    pools = [Pool(str(device), 1, device_free(device)) for device in devices if device.platform != "cpu"]
    if host:
        pools.append(Pool("this machine's memory", len(host), machine_free()))
    return pools


def check_fit(
    needs: Needs, mesh: Mesh | None, report: LoadReport, look: Callable[[list[Any]], list[Pool]] | None = None
) -> None:
    """Refuses what cannot fit, and notes bytes needed and free.

    Arguments:
        look: tells the free memory behind devices; `pools_of` by default.

    Raises ConfigError, in every process alike, naming each memory that is too small with the bytes needed and free.
    """
    look = look or pools_of
    devices = local_devices(mesh)
    pools = look(devices)
    if _short(needs, pools):
        gc.collect()  # an engine that nobody uses any more may wait for that
        pools = look(devices)
    short = _short(needs, pools)
    if told := [text for text in from_all("free memory", short) if text]:
        raise ConfigError(
            "does not fit",
            where=f"memory ({_parts(needs)} bytes a device)",
            found="; ".join(told),
            fix=_advice(needs, pools) if short else None,
        )
    _note(needs, pools, report)


def _parts(needs: Needs) -> str:
    return f"weights {needs.target + needs.draft:,}, caches and state {needs.state:,}"


def _short(needs: Needs, pools: list[Pool]) -> str:
    """The memories that are too small, in words; empty where none is."""
    return ", ".join(
        f"{pool.name}: {needs.held * pool.devices:,} bytes needed"
        + (f" for {pool.devices} devices" if pool.devices > 1 else "")
        + f", {pool.free:,} free"
        for pool in pools
        if pool.free is not None and needs.held * pool.devices > pool.free
    )


def _advice(needs: Needs, pools: list[Pool]) -> str:
    free = min((pool.free // pool.devices for pool in pools if pool.free is not None), default=needs.held)
    if most := needs.longest(free):
        return f"max_len of at most {most:,} with as many slots, or fewer slots"
    return "a mesh with more devices along model" + (", or dtype bfloat16" if needs.sizes.itemsize > 2 else "")


def _note(needs: Needs, pools: list[Pool], report: LoadReport) -> None:
    line = (
        f"{needs.held:,} bytes needed on each device ({_parts(needs)}), about {needs.temporaries:,} more while running"
    )
    known = [(pool.free // pool.devices, pool) for pool in pools if pool.free is not None]
    if not known:
        report.note(SECTION, f"{line}; free memory is not told here: not checked")
        return
    least, pool = min(known, key=lambda pair: pair[0])
    shared = f", shared by {pool.devices} devices" if pool.devices > 1 else ""
    report.note(SECTION, f"{line}; {pool.free:,} free ({pool.name}{shared})")
    if needs.held + needs.temporaries > least:
        report.warn("weights and caches fit into the free memory; with what programs need beside them they may not")
