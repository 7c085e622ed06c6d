"""Writes a difference (`checkpoint/difference.py`): routed experts as int8 rows, beside a config that names the base."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int8, Shaped

from eaglejax.checkpoint.difference import (
    DOWN,
    FILE,
    GATE,
    UP,
    correction_name,
    router_name,
    scale_name,
    stored_name,
)
from eaglejax.checkpoint.difference_compose import moe_layers
from eaglejax.checkpoint.durable import TEMPORARY, sync, write_json
from eaglejax.checkpoint.finite import finite
from eaglejax.checkpoint.safetensors_writer import write_file
from eaglejax.checkpoint.tensors import DTYPES, TensorInfo
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.config import MoEConfig
from eaglejax.models.target_config import read_target_config

ROUTER_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class RoutedLayer:
    """What stands beside the dense FFN in one layer, in float32: E experts of width F, hidden size D."""

    router: Float[np.ndarray, "e d"]
    correction: Float[np.ndarray, " e"]
    gate: Float[np.ndarray, "e f d"]
    up: Float[np.ndarray, "e f d"]
    down: Float[np.ndarray, "e d f"]


@dataclass(frozen=True)
class Written:
    """Bytes on the disk of config.json and of the weights."""

    config: int
    weights: int

    @property
    def total(self) -> int:
        """Of both files."""
        return self.config + self.weights


def write_difference(
    folder: str | Path,
    config: Mapping[str, Any],
    layers: Mapping[int, RoutedLayer],
    *,
    router_dtype: str = "float32",
) -> Written:
    """Writes config.json and model.safetensors into `folder`, which is made where it is missing.

    The old config.json goes first and the new one comes last: a kill in between leaves a folder that is no model, never
    the config of one beside the weights of another. Other files of the folder stay.

    Arguments:
        config: of the whole model, as `difference.difference_config` makes it.
        layers: the routed experts of every MoE layer of `config`, by the layer's index.
        router_dtype: "float32" or "bfloat16", of router weights and correction biases in the file.

    Raises:
        ConfigError: layers or router_dtype are not those of the config. CheckpointError: an array of the wrong shape or
        with values that are not finite. Nothing was written then.
    """
    folder = Path(folder)
    arrays = _arrays(config, layers, router_dtype)
    file = folder / FILE
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    infos = [TensorInfo(n, a.shape, names[a.dtype], file, 0, stored=names[a.dtype]) for n, a in arrays.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    sync(folder)
    fresh = file.with_name(file.name + TEMPORARY)
    write_file(fresh, infos, {"format": "np"}, lambda info: [arrays[info.name]])
    os.replace(fresh, file)
    write_json(folder / "config.json", dict(config))
    return Written((folder / "config.json").stat().st_size, file.stat().st_size)


def quantise_rows(
    weight: Float[np.ndarray, "*rows d"],
) -> tuple[Int8[np.ndarray, "*rows d"], Float32[np.ndarray, "*rows"]]:
    """Values -127..127 and the scale of each row; weight is about value * scale, exactly so where it is zero."""
    scale = (np.abs(weight).max(axis=-1) / np.float32(127)).astype(np.float32)
    # a row of zeros, or one so small that its scale underflows, is stored as zeros
    divisor = np.where(scale > 0, scale, np.float32(np.inf))[..., None]
    values = np.clip(np.rint(weight / divisor), -127, 127).astype(np.int8)
    return values, scale


def _arrays(
    config: Mapping[str, Any], layers: Mapping[int, RoutedLayer], router_dtype: str
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Every tensor of the file, by name."""
    if router_dtype not in ROUTER_DTYPES:
        expected = " or ".join(ROUTER_DTYPES)
        raise ConfigError("is not supported", where="router_dtype", found=repr(router_dtype), expected=expected)
    target = read_target_config(config, where="config").config
    wanted = moe_layers(target)
    if sorted(layers) != list(wanted):
        expected = f"{list(wanted)}, the MoE layers of the config"
        raise ConfigError("other layers than the config's", where="layers", found=sorted(layers), expected=expected)
    dtype = DTYPES[ROUTER_DTYPES[router_dtype]]
    arrays: dict[str, np.ndarray] = {}
    for index in wanted:
        moe, hidden = target.layers[index].mlp, target.hidden_size
        assert isinstance(moe, MoEConfig)
        shapes = {
            "router": (moe.experts, hidden),
            "correction": (moe.experts,),
            "gate": (moe.experts, moe.width, hidden),
            "up": (moe.experts, moe.width, hidden),
            "down": (moe.experts, hidden, moe.width),
        }
        layer = {
            part: _checked(getattr(layers[index], part), shapes[part], f"layer {index}: {part}") for part in shapes
        }
        arrays[router_name(index)] = layer["router"].astype(dtype)
        arrays[correction_name(index)] = layer["correction"].astype(dtype)
        down = np.ascontiguousarray(layer["down"].swapaxes(1, 2))
        for part, weight in ((GATE, layer["gate"]), (UP, layer["up"]), (DOWN, down)):
            arrays[stored_name(index, part)], arrays[scale_name(index, part)] = quantise_rows(weight)
    return arrays


def _checked(values: object, shape: tuple[int, ...], where: str) -> Float32[np.ndarray, "..."]:
    array = np.asarray(values, np.float32)
    if array.shape != shape:
        raise CheckpointError("wrong shape", where=where, found=list(array.shape), expected=list(shape))
    if not finite(array):
        raise CheckpointError("holds values that are no finite numbers", where=where)
    return array
