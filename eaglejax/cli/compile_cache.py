"""The runner's persistent compilation cache: a second start takes its programs from the user's cache folder.

The Python API leaves jax's settings alone. A program that wants the same cache calls `use_compile_cache()` before its
first engine.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from eaglejax.checkpoint.builtin import cache_folder

log = logging.getLogger("eaglejax")

LEAST_COMPILE_SECONDS = 0.5  # quicker programs are not worth a file


def use_compile_cache() -> Path | None:
    """Turn jax's persistent compilation cache on, in the folder that built-in models are kept in too. jax's own
    environment variables (JAX_COMPILATION_CACHE_DIR, ...) stay in force.

    Returns: the folder, or None where it cannot be written (said in a warning; every start then compiles anew).
    """
    import jax

    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("no compilation cache: %s: %s", folder, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
