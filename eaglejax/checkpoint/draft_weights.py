"""Which tensors of a draft's file fill which parameter, checked by shape from the headers, then read one parameter at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike, Shaped

from eaglejax.checkpoint.draft_names import SCALE, DraftTensors
from eaglejax.checkpoint.finite import refuse_nonfinite
from eaglejax.checkpoint.tensors import CheckpointReader
from eaglejax.errors import CheckpointError
from eaglejax.models.config import DraftConfig, LayerConfig, MLAConfig
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves

FLOATS = ("F64", "F32", "F16", "BF16")
QUANTISED = ("I8", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from.

    `names`: our tensor names, stacked along a new first axis where `stacked`. `part`: "key" or "value" half of a
        kv_b_proj, with `heads` and the widths (nope, value) of a head.
    """

    names: tuple[str, ...]
    stacked: bool = False
    part: str = ""
    split: tuple[int, int, int] = (0, 0, 0)

    def expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that each named tensor must have for a parameter of `shape`."""
        if self.part:
            heads, nope, value = self.split
            return (heads * (nope + value), shape[-1])
        return shape[1:] if self.stacked else shape

    def combine(self, arrays: list[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The parameter of the named tensors, as `expected` has their shapes."""
        if self.stacked:
            return np.stack(arrays)
        if not self.part:
            return arrays[0]
        heads, nope, value = self.split
        whole = arrays[0].reshape(heads, nope + value, -1)
        return np.ascontiguousarray(whole[:, :nope] if self.part == "key" else whole[:, nope:])


def sources(config: DraftConfig) -> dict[str, Source]:
    """Parameter path -> its source, for every parameter that a draft of this config has; borrowed ones are included by
    their usual name.
    """
    plan = {
        "embedding.weight": Source(("embed_tokens.weight",)),
        "head.weight": Source(("lm_head.weight",)),
        "norm.scale": Source(("norm.weight",)),
        "fusion.fc.weight": Source(("fc.weight",)),
        "fusion.fc.bias": Source(("fc.bias",)),
        "fusion.joint_norm.scale": Source(("input_norm.weight",)),
        "fusion.target_norm.scale": Source(()),
        "first.hidden_norm.scale": Source(("layers.0.hidden_norm.weight",)),
    }
    for i in range(config.captures):
        plan[f"fusion.capture_norms.{i}.scale"] = Source((f"fc_norm.{i}.weight",))
    for i, layer in enumerate(config.layers):
        plan |= _layer(layer, f"layers.{i}.", "first." if i == 0 else f"others.{i - 1}.")
    return plan


def _layer(layer: LayerConfig, ours: str, path: str) -> dict[str, Source]:
    plan = {
        f"{path}input_norm.scale": Source((f"{ours}input_layernorm.weight",)),
        f"{path}post_norm.scale": Source((f"{ours}post_attention_layernorm.weight",)),
    }
    attention = f"{ours}self_attn."
    singles = {"q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "out": "o_proj"}
    norms = {"q_norm": "q_norm", "k_norm": "k_norm", "q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}
    for kind in ("weight", "bias"):
        for name, theirs in singles.items():
            plan[f"{path}attention.{name}.{kind}"] = Source((f"{attention}{theirs}.{kind}",))
        plan[f"{path}attention.kv.{kind}"] = Source(
            (f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}"), stacked=True
        )
        plan[f"{path}mlp.gate_up.{kind}"] = Source(
            (f"{ours}mlp.gate_proj.{kind}", f"{ours}mlp.up_proj.{kind}"), stacked=True
        )
        plan[f"{path}mlp.down.{kind}"] = Source((f"{ours}mlp.down_proj.{kind}",))
    for name, theirs in norms.items():
        plan[f"{path}attention.{name}.scale"] = Source((f"{attention}{theirs}.weight",))
    if isinstance(a := layer.attention, MLAConfig):
        for part in ("key", "value"):
            split = (a.heads, a.nope_dim, a.value_dim)
            plan[f"{path}attention.{part}_up"] = Source((f"{attention}kv_b_proj.weight",), part=part, split=split)
    return plan


def check_shapes(draft: Draft, tensors: DraftTensors, borrowed: set[str], where: object) -> None:
    """Compares every parameter of the (abstract) draft with the headers, and refuses tensors that no parameter reads.

    `borrowed`: parameter paths that come from the target. Raises CheckpointError with tensor name, shape found and
        shape expected.
    """
    plan = sources(draft.config)
    used: set[str] = set()
    for path, leaf in leaves(draft).items():
        if path in borrowed:
            continue
        for name in plan[path].names:
            info, expected = tensors.infos.get(name), plan[path].expected(leaf.shape)
            if info is None:
                raise CheckpointError(
                    "a tensor of the draft is missing",
                    where=where,
                    found=f"no {name}",
                    expected=f"{name} {list(expected)}",
                )
            if info.shape != expected:
                raise CheckpointError(
                    "a tensor of the draft is misshapen",
                    where=f"{where}: {info.name}",
                    found=list(info.shape),
                    expected=list(expected),
                )
            used.add(name)
            _check_dtype(tensors, name, where)
            if name + SCALE in tensors.infos:
                used.add(name + SCALE)
    switched_off = {"norm.weight", "input_norm.weight"}
    for name in tensors.infos.keys() - used - switched_off - {"d2t", "t2d"}:
        if not name.startswith("fc_norm."):
            raise CheckpointError(
                "a weight in the draft's file has no place in the network that its config describes",
                where=f"{where}: {tensors.infos[name].name}",
                found=list(tensors.infos[name].shape),
                fix="mend the config, or use a file that fits it",
            )


def _check_dtype(tensors: DraftTensors, name: str, where: object) -> None:
    info, scale = tensors.infos[name], tensors.infos.get(name + SCALE)
    where = f"{where}: {info.name}"
    if info.dtype in FLOATS:
        if scale is not None:
            raise CheckpointError("a scale belongs to an integer or float8 weight", where=where, found=info.dtype)
        return
    if info.dtype not in QUANTISED:
        raise CheckpointError(
            "weights of this type are not supported",
            where=where,
            found=info.dtype,
            expected=", ".join(FLOATS + QUANTISED),
        )
    if scale is None:
        raise CheckpointError(f"{info.dtype} weights need their scales", where=where, found=f"no {name}{SCALE}")
    rows = info.shape[0]
    if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)) or scale.dtype not in FLOATS:
        raise CheckpointError(
            "scales of this shape are not supported",
            where=f"{where}{SCALE}",
            found=f"{scale.dtype} {list(scale.shape)}",
            expected=[rows, 1],
        )


def read_parameter(
    reader: CheckpointReader, tensors: DraftTensors, source: Source, dtype: DTypeLike
) -> Shaped[np.ndarray, "..."]:
    """One whole parameter in the compute dtype; integer and float8 weights are multiplied by their scales in
    float32."""
    arrays = [_dequantised(reader, tensors, name) for name in source.names]
    return source.combine(arrays).astype(jnp.dtype(dtype), copy=False)


def _dequantised(reader: CheckpointReader, tensors: DraftTensors, name: str) -> Shaped[np.ndarray, "..."]:
    info = tensors.infos[name]
    array = reader.read(info.name)
    refuse_nonfinite(array, info)
    scale = tensors.infos.get(name + SCALE)
    if scale is None:
        return array
    factors = reader.read(scale.name)
    refuse_nonfinite(factors, scale)
    factors = factors.astype(np.float32)
    if factors.size == info.shape[0]:
        factors = factors.reshape(-1, *[1] * (len(info.shape) - 1))
    return array.astype(np.float32) * factors


def fill(draft: Draft, values: Mapping[str, Any]) -> None:
    """Sets every parameter of an abstract draft; none may stay unset."""
    flat = nnx.to_flat_state(nnx.state(draft, nnx.Param))
    left = {".".join(map(str, path)) for path, _ in flat} - values.keys()
    assert not left, f"parameters without a value: {sorted(left)}"
    nnx.update(
        draft,
        nnx.from_flat_state([(path, variable.replace(values[".".join(map(str, path))])) for path, variable in flat]),
    )
