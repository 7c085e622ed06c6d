"""How the weights of a quantised checkpoint are stored on a device: which ones are packed, and in how many bytes.

Read from `quantization_config` alone, for a plan before any file is there. Packed weights keep their values and a grid of scales; a
scale block that a split or an odd size cuts is told by repeating its scale on a finer grid, so the grid's step along a dim is the
greatest common divisor of the block and the device's own size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from eaglejax.errors import ConfigError

# our module -> the names of the same projection in a released checkpoint, inside its layer
RELEASED = {
    "attention.q": ("self_attn.q_proj",),
    "attention.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "attention.q_a": ("self_attn.q_a_proj",),
    "attention.q_b": ("self_attn.q_b_proj",),
    "attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "attention.key_up": ("self_attn.kv_b_proj",),
    "attention.value_up": ("self_attn.kv_b_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
    "mlp.experts.gate_up": ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
    "mlp.experts.down": ("mlp.experts.0.down_proj",),
}
METHODS = "fp8 (blocks), compressed-tensors (pack-quantized int4, float- or int-quantized), mxfp4"


@dataclass(frozen=True)
class Storage:
    """One way of packing a weight [*lead, out, in].

    `bits`: of a value. `block`: rows and columns that share a scale; None spans the whole dim. `scale_bytes`: of one scale.
    `ignored`: released names, or "re:" patterns, of modules left alone. `only_experts`: nothing but routed experts is packed.
    """

    name: str
    bits: int
    block: tuple[int | None, int | None]
    scale_bytes: int
    ignored: tuple[str, ...] = ()
    only_experts: bool = False

    def covers(self, path: str) -> bool:
        """Whether the weight at `path` ("layers.3.mlp.experts.down") is packed."""
        match = re.match(r"layers\.(\d+)\.(.*?)(\.weight)?$", path)
        if match is None or match[2] not in RELEASED:
            return False
        if self.only_experts and not match[2].startswith("mlp.experts"):
            return False
        names = [f"model.layers.{match[1]}.{name}" for name in RELEASED[match[2]]]
        return not any(_matches(rule, name) for rule in self.ignored for name in names)

    def byte_count(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(bytes of the values, bytes of the scales) of a device's part with this shape."""
        *lead, rows, columns = shape
        step = lambda block, size: size if block is None else gcd(block, size)
        grid = (rows // step(self.block[0], rows)) * (columns // step(self.block[1], columns))
        return prod(shape) * self.bits // 8, prod(lead) * grid * self.scale_bytes


def _matches(rule: str, name: str) -> bool:
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    return name == rule or name.endswith(f".{rule}") or name.startswith(f"{rule}.")


def read_storage(values: Mapping[str, Any], where: object) -> Storage | None:
    """The storage that a config.json (or its nested text part) states; None where nothing is quantised.

    Raises ConfigError for a method or a setting that is not known.
    """
    inner = values.get("text_config")
    places = [values, inner] if isinstance(inner, Mapping) else [values]
    settings = [place.get(key) for place in places for key in ("quantization_config", "compression_config")]
    setting = next((s for s in settings if s), None)
    if setting is None:
        return None
    method = setting.get("quant_method") if isinstance(setting, Mapping) else setting
    match method:
        case "fp8":
            return _fp8(setting, where)
        case "compressed-tensors":
            return _compressed(setting, where)
        case "mxfp4":
            return Storage("MXFP4 in groups of 32", 4, (1, 32), 1, only_experts=True)
    raise _unknown("quant_method", method, METHODS, where)


def _unknown(key: str, found: Any, expected: str, where: object) -> ConfigError:
    place = f"{where}: quantization_config.{key}"
    return ConfigError("weights stored in this way are not known", where=place, found=repr(found), expected=expected)


def _fp8(setting: Mapping[str, Any], where: object) -> Storage:
    block = setting.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise _unknown("weight_block_size", block, "two whole numbers, such as [128, 128]", where)
    ignored = tuple(setting.get("modules_to_not_convert") or ())
    return Storage(f"FP8 in blocks of {block[0]} x {block[1]}", 8, (block[0], block[1]), 4, ignored)


def _compressed(setting: Mapping[str, Any], where: object) -> Storage:
    groups = setting.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    if len(weights) != 1:
        raise _unknown("config_groups", list(groups), "one group", where)
    stated, ignored = weights[0], tuple(setting.get("ignore") or ())
    bits, kind, strategy = stated.get("num_bits"), stated.get("type"), stated.get("strategy")
    if not isinstance(bits, int) or (bits, kind) not in ((4, "int"), (8, "int"), (8, "float")):
        raise _unknown("config_groups", f"{bits} bits, {kind}", "4 or 8 bits int, 8 bits float", where)
    name = f"{'FP' if kind == 'float' else 'INT'}{bits}"
    match strategy:
        case "group":
            size = stated.get("group_size")
            if not isinstance(size, int) or size <= 0:
                raise _unknown("config_groups.group_size", size, "a whole number above 0", where)
            return Storage(f"{name} in groups of {size}", bits, (1, size), 2, ignored)
        case "channel":
            return Storage(f"{name} with one scale a row", bits, (1, None), 4 if kind == "float" else 2, ignored)
        case "block":
            rows, columns = stated.get("block_structure") or (128, 128)
            return Storage(f"{name} in blocks of {rows} x {columns}", bits, (rows, columns), 4, ignored)
    raise _unknown("config_groups.strategy", strategy, "group, channel or block", where)
