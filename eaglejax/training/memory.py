"""Whether a train step fits its devices, asked of the compiled program before the first step."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from eaglejax.errors import ConfigError
from eaglejax.sharding.fit import device_free, local_devices


def free_bytes(mesh: Mesh | None) -> int | None:
    """Memory that nothing holds yet on the device that has least; None where one does not say (a CPU)."""
    known = []
    for device in local_devices(mesh):
        free = device_free(device)
        if free is None:
            return None
        known.append(free)
    return min(known)


def check_fits(compiled: Any, rows: int, row_length: int, mesh: Mesh | None) -> int:
    """Bytes that the program takes on each device beside its arguments, which are there already.

    Arguments:
        rows, row_length: of a whole batch.

    Raises ConfigError with both figures where a device has less.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:  # a backend that does not tell
        return 0
    # of a program for several devices these are the bytes of one
    need = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    free, each = free_bytes(mesh), "" if mesh is None else " on each device"
    if free is not None and need > free:
        raise ConfigError(
            "a train step does not fit the device's memory",
            where=f"batch {rows}, row_length {row_length}",
            found=f"{need / 1e9:.3f} GB beside weights and text{each}",
            expected=f"at most {free / 1e9:.3f} GB",
            fix="a smaller batch with more accumulate, "
            + ("" if mesh is None else "a mesh with more devices along data, ")
            + "or a shorter row_length",
        )
    return int(need)
