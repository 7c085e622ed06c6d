"""Weight-only quantisation of a plain checkpoint while it is converted, by qwix, in the form of compressed-tensors.

int8: "int-quantized", one float32 scale per output channel. int4: "pack-quantized", symmetric, one bfloat16 scale per 32
inputs, eight values per int32, lowest bits first, stored with an offset of 8. Nothing is calibrated on text: the
largest weight of a channel or group sets its scale, as qwix does it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from eaglejax.checkpoint.json_file import read_json
from eaglejax.checkpoint.tensors import CheckpointReader, TensorInfo
from eaglejax.errors import CheckpointError, ConfigError

KINDS = ("int8", "int4")
GROUP = 32
FLOATS = ("F32", "BF16", "F16")
# float32 bytes that are quantised at a time
BLOCK_BYTES = 32 << 20
# The projections of the decoder layers. Whatever is not named here stays as it is: embedding, head, norms, routers, MLA's
# kv_b_proj (it is absorbed into the attention, not multiplied with), vision towers, experts fused into one tensor.
PROJECTION = re.compile(
    r"(?:^|\.)(?:layers|blocks)\.\d+\..*\b"
    r"(?:q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)
FUSED = re.compile(r"(?:^|\.)(?:layers|blocks)\.\d+\..*\bexperts\.")
FOREIGN = ("vision", "visual", "mm_projector")


class QuantisedReader(CheckpointReader):
    """The tensors that the quantised checkpoint holds, made from `plain` when they are read.

    Attributes:
        quantised: names of the weights that are quantised. ignored: modules with a matrix that is not.
        left_plain: names of projections among those, which a reader of "quantised" would expect to be: experts fused into one
            tensor, and with int4 rows that groups of 32 do not divide.
    """

    def __init__(self, plain: CheckpointReader, kind: str):
        self.plain, self.kind = plain, kind
        self.quantised: list[str] = []
        self.ignored: list[str] = []
        self.left_plain: list[str] = []
        self._last: tuple[str, dict[str, Shaped[np.ndarray, "..."]]] = ("", {})
        tensors: dict[str, TensorInfo] = {}
        for name, info in plain.tensors.items():
            if _chosen(info, kind):
                self.quantised.append(name)
                tensors |= {made.name: made for made in _made(info, kind)}
                continue
            tensors[name] = info
            expected = _expected(info)
            if expected:
                self.left_plain.append(name)
            if expected or (len(info.shape) == 2 and name.endswith(".weight") and "embed" not in name):
                self.ignored.append(name.removesuffix(".weight"))
        if not self.quantised:
            raise CheckpointError(
                "holds no projection that can be quantised",
                where=plain.path,
                found=f"{len(plain.tensors)} tensors",
                expected=f"matrices such as model.layers.0.self_attn.q_proj.weight in {', '.join(FLOATS)}",
            )
        super().__init__(plain.path, tensors, plain.metadata)
        self._source = {made.name: name for name in self.quantised for made in _made(plain.tensors[name], kind)}

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        info = self.info(name)
        source = self._source.get(name)
        if source is None:
            return self.plain.read(info.name)
        if self._last[0] != source:
            self._last = (source, self._quantise(source))
        return self._last[1][name]

    def read_rows(self, name: str, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        self._check_rows(self.info(name), start, stop)
        return self.read(name)[start:stop]

    def _quantise(self, name: str) -> dict[str, Shaped[np.ndarray, "..."]]:
        info = self.plain.tensors[name]
        rows = max(1, BLOCK_BYTES // (4 * info.shape[1]))
        parts = []
        for start in range(0, info.shape[0], rows):
            weight = self.plain.read_rows(name, start, min(start + rows, info.shape[0])).astype(np.float32)
            if not np.isfinite(weight).all():
                raise CheckpointError(f"tensor {name!r} holds values that are no numbers", where=info.file)
            parts.append(quantise(weight, self.kind))
        values, scale = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if self.kind == "int8":
            return {name: values, f"{name}_scale": scale}
        shape = np.array(info.shape, np.int64)
        return {f"{name}_packed": pack(values), f"{name}_scale": scale, f"{name}_shape": shape}


def _chosen(info: TensorInfo, kind: str) -> bool:
    return (
        info.dtype in FLOATS
        and len(info.shape) == 2
        and _expected(info)
        and (kind == "int8" or info.shape[1] % GROUP == 0)
    )


def _expected(info: TensorInfo) -> bool:
    """Whether this is a projection of the layers, or those of many experts in one tensor [e, .., ..]."""
    if info.size == 0 or any(word in info.name for word in FOREIGN):
        return False
    fused = len(info.shape) == 3 and FUSED.search(info.name) is not None
    return fused or (len(info.shape) == 2 and PROJECTION.search(info.name) is not None)


def _made(info: TensorInfo, kind: str) -> list[TensorInfo]:
    """The entries that take the place of a weight's."""
    name, (out, width) = info.name, info.shape
    if kind == "int8":
        made = {name: ((out, width), "I8"), f"{name}_scale": ((out, 1), "F32")}
    else:
        made = {
            f"{name}_packed": ((out, width // 8), "I32"),
            f"{name}_scale": ((out, width // GROUP), "BF16"),
            f"{name}_shape": ((2,), "I64"),
        }
    return [replace(info, name=n, shape=shape, dtype=dtype, stored=dtype) for n, (shape, dtype) in made.items()]


@functools.cache
def _quantiser(kind: str) -> Any:
    import jax
    import jax.numpy as jnp

    qwix = importlib.import_module("qwix")

    def run(weight):
        if kind == "int8":
            made = qwix.quantize(weight, jnp.int8, channelwise_axes=(0,))
        else:
            made = qwix.quantize(
                weight, jnp.int4, channelwise_axes=(0,), tiled_axes={1: GROUP}, scale_dtype=jnp.bfloat16
            )
        return made.qvalue.astype(jnp.int8), made.scale

    return jax.jit(run)


def quantise(
    weight: Float[np.ndarray, "out width"], kind: str
) -> tuple[Int[np.ndarray, "out width"], Float[np.ndarray, "out groups"]]:
    """Values and scales of a float32 weight; weight is about value * scale. int4 values lie in -8..7, one per int8."""
    values, scale = _quantiser(kind)(weight)
    return np.asarray(values), np.asarray(scale)


def pack(values: Int[np.ndarray, "out width"]) -> Int[np.ndarray, "out words"]:
    """Eight values -8..7 per int32, the first in the lowest bits, with an offset of 8."""
    nibbles = (values.astype(np.int32) + 8).astype(np.uint32).reshape(len(values), -1, 8)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(nibbles << shifts, axis=-1).view(np.int32)


def check_quantise(kind: str, folder: Path, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a checkpoint that can be quantised.

    Arguments:
        config: where it is not the one in `folder` (`CheckpointReader.hf_config`).

    Raises:
        ConfigError: an unknown kind, no qwix, or a checkpoint that is quantised already. CheckpointError: no config.
    """
    if kind not in KINDS:
        raise ConfigError("unknown", where="quantize", found=repr(kind), expected=" or ".join(KINDS))
    config = read_json(folder / "config.json") if config is None else config
    for values in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in ("quantization_config", "compression_config"):
            if values.get(key):
                raise ConfigError(
                    "the checkpoint is quantised already",
                    where=f"{folder / 'config.json'}: {key}",
                    found=json.dumps(values[key])[:120],
                    expected="weights in bfloat16 or float32",
                )
    if importlib.util.find_spec("qwix") is None:
        raise ConfigError(
            "quantising needs the package qwix, which is not installed",
            where="quantize",
            fix="pip install 'qwix>=0.1.8'",
        )
    return config


def quantised_config(config: Mapping[str, Any], reader: QuantisedReader) -> dict[str, Any]:
    """The config.json that goes with the tensors of `reader`."""
    four = reader.kind == "int4"
    weights = {
        "num_bits": 4 if four else 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if four else "channel",
        "group_size": GROUP if four else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        **config,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if four else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": reader.ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        },
    }
