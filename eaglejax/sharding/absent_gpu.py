"""GPUs that this machine does not have, to compile programs for: XLA's own figures of their memory and collectives, without one.

Needs jax's CUDA plugin (the extras cuda12 and cuda13), which holds the compiler; a driver or a card it does not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from eaglejax.errors import ConfigError
from eaglejax.sharding.model_names import config_places

PLACES = config_places("gpus")


def known_gpus() -> list[str]:
    """Names of the GPUs that are described in configs/gpus."""
    return sorted({file.stem for place in PLACES for file in place.glob("*.txtpb")})


def stay_on_cpu() -> None:
    """Keeps this process off the GPUs that may be here; without one, jax's plugin would refuse to load. Has to run before jax's devices
    are used."""
    jax.config.update("jax_platforms", "cpu")


def absent_gpus(name: str, count: int) -> list[Any]:
    """`count` devices of one host, to compile for; nothing can run on them.

    Arguments:
        name: one of `known_gpus`, or a file with XLA's GpuTargetConfigProto as text.

    Raises ConfigError: no such description, or jax has no compiler for it here.
    """
    files = [place / f"{name}.txtpb" for place in PLACES] + [Path(name)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(
            "no description of this GPU",
            where="compile_for",
            found=repr(name),
            expected=f"{', '.join(known_gpus())}, or a file with XLA's GpuTargetConfigProto as text",
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{count}", target_config=file.read_text(encoding="utf-8")
        )
    except (RuntimeError, NotImplementedError, KeyError, ValueError) as error:
        reason = str(error).splitlines() or ["no reason given"]
        raise ConfigError(
            f"jax cannot compile for a GPU here: {reason[0]}",
            where="compile_for",
            found=repr(name),
            fix='install the CUDA plugin of the jax that is here: pip install "eaglejax[cuda13]" (or cuda12)',
        ) from None
    return list(topology.devices)
