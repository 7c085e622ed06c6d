"""Which form of each kernel runs where. One place, by name, reported by `describe`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import jax

from eaglejax.errors import ConfigError
from eaglejax.kernels.experts_gpu_shape import MOST_ROUTED, MOST_ROWS

VARIABLE = "EAGLEJAX_KERNELS"
_compiled_for: ContextVar[tuple[str, str | None] | None] = ContextVar("compiled_for", default=None)

FORMS = ("auto", "xla", "pallas")
# a context that jax's caches of traces know of: a trace made under one choice is not taken for another
_kernels = jax.make_user_context(None)


def kernels(form: str) -> AbstractContextManager[object]:
    """Programs traced inside use the forms that this says: "xla"; "pallas" wherever the kernels can run; "auto", where they also pay.

    Outside of it the environment variable EAGLEJAX_KERNELS says so, by default "auto".
    """
    return _kernels(_checked(form, "kernels"))


def chosen_kernels() -> str:
    """ "auto", "xla" or "pallas", as asked for."""
    return _kernels.value or _checked(os.environ.get(VARIABLE) or "auto", VARIABLE)


def _checked(form: str, where: str) -> str:
    if form not in FORMS:
        raise ConfigError("no such kernels", where=where, found=repr(form), expected=", ".join(FORMS))
    return form


def platform() -> str:
    """Where the program being traced will run: "cpu", "gpu", "tpu"."""
    asked = _compiled_for.get()
    return jax.default_backend() if asked is None else asked[0]


def capability() -> str:
    """Compute capability of the GPUs that the program being traced is for, such as "12.0"; in a plan for GPUs without a name, Hopper's."""
    asked = _compiled_for.get()
    if asked is not None and asked[1] is not None:
        return asked[1]
    if jax.default_backend() != "gpu":
        return "9.0"
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


@contextmanager
def compiling_for(name: str, capability: str | None = None) -> Iterator[None]:
    """Programs traced inside are for devices of this platform, which this machine need not have.

    Arguments:
        capability: of the GPUs; None: of those that are here, or Hopper's.
    """
    token = _compiled_for.set((name, capability))
    try:
        yield
    finally:
        _compiled_for.reset(token)


def compiled_elsewhere() -> bool:
    """Whether the program being traced is for devices that this machine need not have."""
    return _compiled_for.get() is not None


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


# cached rows from which the Pallas form of tree attention is used: with fewer, launches are all that counts
PALLAS_FROM_ROWS = 1024
PALLAS_FROM_JAX = (0, 11)  # with 0.10 the same kernels lower differently
PORTABLE_FROM = 8  # bfloat16 on tensor cores begins with compute capability 8.0


def no_pallas() -> str | None:
    """Why no Pallas kernel is used in the program being traced, or None. They are written for Hopper GPUs (H100, H200)."""
    if chosen_kernels() == "xla":
        return "XLA was asked for"
    if platform() != "gpu":
        return f"no GPU ({platform()})"
    if jax.__version_info__[:2] < PALLAS_FROM_JAX:
        return f"jax {jax.__version__} is too old"
    if not (found := capability()).startswith("9."):
        return f"not a Hopper GPU (compute capability {found})"
    return None


def attention_kernel() -> str | None:
    """Which kernel of ours may do tree attention in the program being traced: "hopper"; "portable", on other NVIDIA GPUs from sm_80 on and
    only where "pallas" is asked for, as no card has run it; or None."""
    if no_pallas() is None:
        return "hopper"
    if chosen_kernels() != "pallas" or platform() != "gpu" or jax.__version_info__[:2] < PALLAS_FROM_JAX:
        return None
    major = capability().split(".")[0]  # of an AMD GPU a name
    return "portable" if major.isdigit() and int(major) >= PORTABLE_FROM and major != "9" else None


def form() -> str:
    """In a word, which kernels programs traced here are made of, for what was measured with them: "jnp", "xla", "pallas" wherever they
    can run, or "auto": Pallas where it pays."""
    if platform() == "cpu":
        return "jnp"
    return "xla" if attention_kernel() is None else chosen_kernels()


def attention_form(cached_rows: int, reason: str | None) -> str:
    """ "pallas" or "xla" for tree attention over this many cached rows. `reason`: why the kernel does not serve them, if so."""
    pays = cached_rows >= PALLAS_FROM_ROWS or chosen_kernels() == "pallas"
    return "pallas" if attention_kernel() is not None and reason is None and pays else "xla"


def describe() -> list[str]:
    """One line per kernel for the load report."""
    backend, reason = platform(), no_pallas()
    if backend == "cpu":
        attention, experts = (
            "jnp, cache read in blocks up to the longest slot",
            "jnp, loop over the experts that are touched",
        )
    else:
        attention = "XLA, whole cache masked by length"
        if reason is None:
            least = 1 if chosen_kernels() == "pallas" else PALLAS_FROM_ROWS
            attention = f"Pallas for few rows in bfloat16 over a cache of {least} rows or more, else {attention}"
        elif attention_kernel() == "portable":
            attention = f"Pallas (Triton) in bfloat16 and float32, never run on a card, else {attention}"
            attention = f"{attention}; no other kernel of ours: {reason}"
        elif backend == "gpu":
            attention = f"{attention}; Pallas not used: {reason}"
        experts = "XLA, weights gathered per (row, expert) for few rows, else a loop over all experts"
        if reason is None:
            ours = f"Pallas for up to {MOST_ROWS} rows of bfloat16 in whole tiles (up to {MOST_ROUTED}: routers too)"
            packed = ", packed INT4 and FP8 too (not measured)" if chosen_kernels() == "pallas" else ""
            experts = f"{ours}{packed}; otherwise {experts}"
    if chosen_kernels() == "pallas" and reason and backend != "gpu":
        attention = f"{attention}; Pallas was asked for and is not used: {reason}"
    ends = ", with the experts' sums at a layer's end (not measured)" if chosen_kernels() == "pallas" else ""
    between = (
        ("jnp" if backend == "cpu" else "XLA") if reason else f"Pallas for few rows in bfloat16{ends}, otherwise XLA"
    )
    return [
        f"tree attention: {attention} ({backend})",
        f"experts: {experts} ({backend})",
        f"norms and rotation: {between} ({backend})",
    ]
