"""Whether a train step fits the device, asked of the compiled program before the first step."""

from __future__ import annotations

from typing import Any

import jax

from eaglejax.errors import ConfigError


def free_bytes() -> int | None:
    """Memory of the first device that nothing holds yet; None where the device does not say (a CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit) - int(stats.get("bytes_in_use", 0))


def check_fits(compiled: Any, rows: int, row_length: int) -> int:
    """Bytes that the program takes beside its arguments, which are there already.

    Raises ConfigError with both figures where the device has less.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:  # a backend that does not tell
        return 0
    need = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    free = free_bytes()
    if free is not None and need > free:
        raise ConfigError(
            "a train step does not fit the device's memory",
            where=f"batch {rows}, row_length {row_length}",
            found=f"{need / 1e9:.3f} GB beside weights and text",
            expected=f"at most {free / 1e9:.3f} GB",
            fix="a smaller batch with more accumulate, or a shorter row_length",
        )
    return int(need)
