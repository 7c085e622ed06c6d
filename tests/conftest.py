"""Settings every test runs under: strict dtypes, so that nothing is promoted by accident."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# The programs run for milliseconds: without the first two, most of a test would be LLVM at work. Eight devices for the tests of
# meshes: eight threads that wait for one another, on two busy cores perhaps longer than the 40 s after which XLA ends the process.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
]
# the older emitters compile a third faster; later versions have them no more, and die of the flag
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# Threads that XLA may use. By itself it makes as many as devices, and collectives hold them while they wait: once a program on a mesh
# stood still until XLA ended the process. With some to spare tests of meshes also take less time (226 s against 265).
os.environ.setdefault("NPROC", "24")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
# What is imported lives as long as the process: without this the collector looks through it again and again.
gc.freeze()
gc.set_threshold(20_000, 20, 50)


MANY_MAPS, MANY_PAGES = 16_000, (5 << 29) // 4096  # of the 65,530 maps that Linux lets a process have; 2.5 GiB


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Programs of earlier test files are dropped: each takes memory and maps of it, and a process that has too many maps dies."""
    yield
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if maps.exists() and pages.exists():
        resident = int(pages.read_text().split()[1])
        if maps.read_bytes().count(b"\n") > MANY_MAPS or resident > MANY_PAGES:
            jax.clear_caches()
            gc.collect()


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of stored test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The built-in model's GGUF file, fetched once into the user's own cache folder and taken from there ever after."""
    from eaglejax.checkpoint.builtin import builtin_path

    return builtin_path("smollm2")
