"""Random checkpoints of any family in quantised form, with the weights that they stand for; written and widened here by
plain numpy in float64, independent of the package."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoint_files import write_safetensors

from eaglejax.checkpoint.weight_plan import Stems, target_plan
from eaglejax.models.target_config import read_target_config

STORED = Path(__file__).parents[1] / "data" / "targets"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def config_of(name: str, **changes) -> dict:
    """A stored config.json; changes go where the text part is."""
    values = json.loads((STORED / name / "config.json").read_text())
    text = values["text_config"] if "text_config" in values else values
    text |= changes
    return values


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a plain checkpoint of that config, released names, float32."""
    reading = read_target_config(config)
    prefix, head = reading.family.prefixes[0]
    plan = target_plan(reading.config, reading.family, Stems(prefix, head, f"{prefix}layers."))
    rng = np.random.default_rng(seed)
    shapes = {part.name: part.shape for recipes in plan.values() for part in recipes[0]}
    return {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def is_expert(name: str) -> bool:
    return ".experts." in name and "bias" not in name


def is_projection(name: str) -> bool:
    return name.endswith("proj.weight") or name.endswith("proj_with_mqa.weight")


def spread(scale: np.ndarray, rows: int, columns: int, shape: tuple[int, ...]) -> np.ndarray:
    """Every scale over its block, in float64."""
    wide = np.repeat(np.repeat(scale.astype(np.float64), rows, axis=-2), columns, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def widen(values: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:
    """The float32 weights of the arrays that are kept on a device, in float64 up to the last step."""
    if kind in ("int4", "mxfp4"):
        nibbles = np.stack((values & 15, values >> 4), axis=-1).reshape(*values.shape[:-1], -1)
        wide = nibbles.astype(np.float64) - 8 if kind == "int4" else FP4[nibbles]
    else:
        wide = values.astype(np.float64)
    factors = 2.0 ** (scale.astype(np.float64) - 127) if kind == "mxfp4" else scale.astype(np.float64)
    rows, columns = (a // b for a, b in zip(wide.shape[-2:], factors.shape[-2:], strict=True))
    return (wide * spread(factors, rows, columns, wide.shape)).astype(np.float32)


def block_max(w: np.ndarray, rows: int, columns: int) -> np.ndarray:
    out, width = w.shape[-2:]
    grid = (math.ceil(out / rows), math.ceil(width / columns))
    largest = np.zeros((*w.shape[:-2], *grid))
    for i in range(grid[0]):
        for j in range(grid[1]):
            block = np.abs(w[..., i * rows : (i + 1) * rows, j * columns : (j + 1) * columns])
            largest[..., i, j] = block.max(axis=(-1, -2))
    return largest


def fp8(name: str, w: np.ndarray, rows: int, columns: int, ending="_scale_inv", dtype=np.float32):
    """e4m3 in blocks. Returns the tensors of the file and the float32 weights they stand for."""
    scale = (block_max(w, rows, columns) / 448).astype(dtype)
    wide = spread(scale, rows, columns, w.shape)
    values = (w / wide).astype(ml_dtypes.float8_e4m3fn)
    exact = (values.astype(np.float64) * wide).astype(np.float32)
    return {name: values, name + ending: scale}, exact


def int8(name: str, w: np.ndarray):
    scale = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float32)
    values = np.round(w / scale).astype(np.int8)
    return {name: values, f"{name}_scale": scale}, (values.astype(np.float64) * scale).astype(np.float32)


def int4(name: str, w: np.ndarray, group: int):
    """Eight to an int32, lowest bits first, offset 8; rows padded to whole int32s."""
    scale = (block_max(w, 1, group) / 7).astype(ml_dtypes.bfloat16)
    wide = spread(scale, 1, group, w.shape)
    values = np.clip(np.round(w / wide), -8, 7).astype(np.int64)
    out, width = w.shape
    words = np.zeros((out, math.ceil(width / 8)), np.uint64)
    for column in range(width):
        words[:, column // 8] |= (values[:, column] + 8).astype(np.uint64) << np.uint64(4 * (column % 8))
    packed = words.astype(np.uint32).view(np.int32)
    tensors = {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": np.array([out, width], np.int64)}
    return tensors, (values * wide).astype(np.float32)


def mxfp4(name: str, w: np.ndarray):
    """w [e, in, out] as gpt-oss has it plain; blocks of 32 along `in` of [e, out, in], a power of two for each."""
    rows = np.swapaxes(w, 1, 2).astype(np.float64)
    e, out, width = rows.shape
    blocks = rows.reshape(e, out, width // 32, 32)
    exponent = np.ceil(np.log2(np.abs(blocks).max(axis=-1) / 6)).astype(np.int64)
    codes = np.abs(blocks[..., None] / 2.0 ** exponent[..., None, None] - FP4).argmin(axis=-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    exact = FP4[codes] * 2.0 ** exponent[..., None]
    tensors = {f"{name}_blocks": packed, f"{name}_scales": (exponent + 127).astype(np.uint8)}
    return tensors, np.swapaxes(exact.reshape(e, out, width), 1, 2).astype(np.float32)


def compressed(form: str, weights: dict, ignore=(), activations=None) -> dict:
    """A quantization_config as compressed-tensors writes it."""
    weights = {"symmetric": True, "dynamic": False, "actorder": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *ignore],
        "config_groups": {"group_0": group},
    }


NOT_EXPERTS = ("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
WIDE = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=8)
# family and its sizes, which tensors are quantised, how, and what the config says of it
CASES = {
    # blocks that neither heads, halves nor sizes respect
    "fp8_block": (
        ("deepseek_v3_config", WIDE | dict(num_attention_heads=8, kv_lora_rank=32)),
        is_projection,
        lambda name, w: fp8(name, w, 24, 20),
        dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[24, 20]),
    ),
    "fp8_channel": (
        ("glm4_moe", WIDE | dict(num_attention_heads=8)),
        is_projection,
        lambda name, w: fp8(name, w, 1, w.shape[1], "_scale", ml_dtypes.bfloat16),
        compressed("float-quantized", dict(num_bits=8, type="float", strategy="channel"), activations=DYNAMIC),
    ),
    "fp8_tensor": (
        ("glm4_moe", WIDE | dict(num_attention_heads=8)),
        is_projection,
        lambda name, w: fp8(name, w, *w.shape, "_scale"),
        compressed("float-quantized", dict(num_bits=8, type="float", strategy="tensor")),
    ),
    "int8_channel": (
        ("deepseek_no_q_lora", WIDE | dict(num_attention_heads=8)),
        is_projection,
        int8,
        compressed("int-quantized", dict(num_bits=8, type="int", strategy="channel")),
    ),
    "int4_group": (
        ("kimi_k25", WIDE),
        is_expert,
        lambda name, w: int4(name, w, 16),
        compressed("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=16), NOT_EXPERTS),
    ),
    "int4_padded": (  # rows of 12 weights in two int32s, and latent attention cut by heads
        ("kimi_k25", dict(moe_intermediate_size=12)),
        is_projection,
        lambda name, w: int4(name, w, 4),
        compressed("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=4)),
    ),
    "mxfp4": (
        ("gpt_oss", dict(hidden_size=64, intermediate_size=96, num_local_experts=8, num_attention_heads=8)),
        is_expert,
        mxfp4,
        dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]),
    ),
}


def case_tensors(case: str) -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """config.json, the tensors of the quantised checkpoint, and those of a plain one of the same weights."""
    (name, sizes), chosen, quantise, setting = CASES[case]
    config = config_of(name, **sizes, quantization_config=setting)
    stored, exact = {}, {}
    for key, w in random_tensors(config).items():
        if chosen(key):
            parts, exact[key] = quantise(key, w)
            stored |= parts
        else:
            stored[key] = exact[key] = w
    return config, stored, exact


def write_case(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    write_safetensors(folder / "model.safetensors", {k: np.ascontiguousarray(v) for k, v in tensors.items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plain_config(config: dict) -> dict:
    """The same without a quantisation."""
    values = {key: value for key, value in config.items() if key != "quantization_config"}
    if "text_config" in values:
        values["text_config"] = plain_config(values["text_config"])
    return values
