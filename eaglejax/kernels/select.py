"""Which form of each kernel runs where. One place, by name, reported by `describe`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from eaglejax.errors import ConfigError
from eaglejax.kernels.experts_gpu_shape import MOST_ROUTED, MOST_ROWS

VARIABLE = "EAGLEJAX_KERNELS"
_compiled_for: ContextVar[str | None] = ContextVar("compiled_for", default=None)


def platform() -> str:
    """Where the program being traced will run: "cpu", "gpu", "tpu"."""
    return _compiled_for.get() or jax.default_backend()


@contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Programs traced inside are for devices of this platform, which this machine need not have."""
    token = _compiled_for.set(name)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def kernels_asked() -> str:
    """What EAGLEJAX_KERNELS asks for: "auto", "xla" (never a kernel of our own), "pallas" (ours on any GPU)."""
    asked = os.environ.get(VARIABLE) or "auto"
    if asked not in ("auto", "xla", "pallas"):
        raise ConfigError(
            "no such form of the kernels", where=VARIABLE, found=repr(asked), expected="auto, xla or pallas"
        )
    return asked


def mosaic() -> bool:
    """Whether the program being traced may use our Mosaic kernels: those are for Hopper GPUs and for jax 0.11 or later.

    A GPU that is compiled for and is not here is taken to be one.
    """
    asked = kernels_asked()
    if platform() != "gpu" or asked == "xla" or jax.__version_info__ < (0, 11):
        return False
    if asked == "pallas" or _compiled_for.get() is not None:
        return True
    return str(getattr(jax.local_devices()[0], "compute_capability", "")).startswith("9.")


# measured on 2 cores with SmolLM2: 64 is 0.3 ms a step faster at 60 tokens, 256 is 0.2 ms faster at 500
CPU_PREFIX_BLOCK = 128


def prefix_block(cached_rows: int) -> int | None:
    """Rows of the cache read at a time by tree attention, or None for the whole cache at once.

    On a CPU a loop over blocks reads only as far as the longest slot. On a GPU a loop of unknown length costs a host round trip per layer,
    so the whole (masked) cache is read there.
    """
    if platform() == "cpu" and cached_rows > CPU_PREFIX_BLOCK:
        return CPU_PREFIX_BLOCK
    return None


def describe() -> list[str]:
    """One line per kernel for the load report."""
    backend = platform()
    if backend == "cpu":
        attention, experts = (
            "jnp, cache read in blocks up to the longest slot",
            "jnp, loop over the experts that are touched",
        )
    else:
        attention = "XLA, whole cache masked by length"
        experts = "XLA, weights gathered per (row, expert) for few rows, else a loop over all experts"
        if mosaic():
            ours = f"Mosaic kernels for up to {MOST_ROWS} rows of bfloat16 in whole tiles (up to {MOST_ROUTED}: routers too)"
            experts = f"{ours}; otherwise {experts}"
    return [f"tree attention: {attention} ({backend})", f"experts: {experts} ({backend})"]
