"""What the devices at hand reach: measured here, in a second, for machines that no preset describes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import DTypeLike

from eaglejax.measure.hardware import Hardware
from eaglejax.models.layers import project
from eaglejax.sharding.mesh import MODEL, axis_size

READ_BYTES = 256 * 2**20
SQUARE = {"cpu": 1024, "gpu": 8192}
# products in one program: a GPU is done with one before the host has started the next
READS = {"cpu": 1, "gpu": 64}
REPEATS = 5
SUMS = 64  # all-reduces of one timed program
SMALL, LARGE = 1024, 2**20  # float32 values of an all-reduce


def measure_speed(mesh: Mesh | None, dtype: DTypeLike) -> Hardware:
    """One device of the mesh (the first device without one) and its link to the others; each figure is the best of five.

    Arguments:
        dtype: of the products, the engine's compute dtype.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    size = jnp.dtype(dtype).itemsize
    with jax.default_device(device):
        bandwidth = _bandwidth(dtype, size, READS.get(device.platform, READS["gpu"]))
        flops = _flops(dtype, SQUARE.get(device.platform, SQUARE["gpu"]))
    allreduce, link = _collectives(mesh)
    sources = {
        "bandwidth": f"measured: product of a matrix of {READ_BYTES // 2**20} MiB with a vector",
        "flops": f"measured: product of square matrices in {jnp.dtype(dtype).name}",
    }
    if allreduce:
        sources |= {
            "allreduce": f"measured: {SUMS} of {4 * SMALL} bytes in a loop",
            "link": f"measured: of {4 * LARGE} bytes",
        }
    return Hardware(device.device_kind, bandwidth, flops, allreduce, link, 0, sources)


def _best(run: Callable[..., Any], *arguments: Any) -> float:
    jax.block_until_ready(run(*arguments))  # compiles
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times)


def _bandwidth(dtype: DTypeLike, size: int, reads: int) -> float:
    columns = 4096
    weight = jnp.zeros((READ_BYTES // size // columns, columns), dtype)
    # each product waits for the one before
    again = lambda weight: lambda _, x: project(x, weight)[:, :columns]
    run = jax.jit(lambda x, weight: lax.fori_loop(0, reads, again(weight), x))
    return reads * READ_BYTES / _best(run, jnp.ones((1, columns), dtype), weight)


def _flops(dtype: DTypeLike, width: int) -> float:
    square = jnp.ones((width, width), dtype)
    return 2 * width**3 / _best(jax.jit(project), square, square)


def _collectives(mesh: Mesh | None) -> tuple[float, float]:
    """(seconds of a small all-reduce, bytes/s that a device sends); the latency is 0 where there is none to wait for."""
    devices = axis_size(mesh, MODEL)
    if mesh is None or devices == 1:
        return 0.0, float("inf")

    def seconds(values: int) -> float:
        # each sum waits for the one before
        again = lambda _, x: lax.psum(x, MODEL) / devices
        run = lambda x: lax.fori_loop(0, SUMS, again, x)
        spread = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        return _best(spread, jnp.ones(values, jnp.float32)) / SUMS

    small, large = seconds(SMALL), seconds(LARGE)
    sent = 2 * 4 * (LARGE - SMALL) * (devices - 1) / devices
    return small, sent / max(large - small, 1e-9)
