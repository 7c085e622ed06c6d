"""The decoder layers of a draft: attention (grouped-query or latent), window, RoPE and MLP, from its config and tensor
shapes.
"""

from __future__ import annotations

from typing import Any

from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MLAConfig, RopeConfig
from eaglejax.models.draft_formats import FlatConfig, Shapes
from eaglejax.models.layers import ACTIVATIONS
from eaglejax.models.rope import mla_scale, read_rope

PAIRINGS = ("halves", "interleaved")


def read_layers(
    flat: FlatConfig, tensors: Shapes, hidden: int, where: object, report: LoadReport
) -> tuple[LayerConfig, ...]:
    """One LayerConfig per layer found in the tensors; the first reads 2 x hidden, the others are ordinary blocks.

    `num_hidden_layers` of a config is often a stale copy: the tensors count. Raises ConfigError or CheckpointError
    naming key or tensor.
    """
    count = tensors.layer_count()
    said = flat.layer.get("num_hidden_layers")
    if said is not None and said != count:
        report.note("draft", f"num_hidden_layers {said} in the config is a stale copy: the file holds {count}")
    latent = tensors.shape("layers.0.self_attn.kv_a_proj_with_mqa.weight") is not None
    layers = []
    for index in range(count):
        attention = _latent(flat, tensors, where) if latent else _grouped(flat, tensors, index, hidden, where)
        layers.append(LayerConfig(attention, _mlp(flat, tensors, index, where)))
    _report_rope(flat, layers[0].attention.rope, report)
    return tuple(layers)


def _need(flat: FlatConfig, key: str, where: object) -> int:
    value = flat.layer.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError("must be a whole number above 0", where=f"{where}: {key}", found=repr(value))
    return value


def _rows(tensors: Shapes, name: str, rows: int, why: str, where: object) -> None:
    """Refuses a projection whose rows do not follow from the config."""
    shape = tensors.shape(name)
    if shape is None:
        raise CheckpointError(
            "tensor is missing", where=f"{where}: {name}", found="absent", expected=f"[{rows}, ...] ({why})"
        )
    if shape[0] != rows:
        raise CheckpointError(
            "does not fit the config", where=f"{where}: {name}", found=f"{shape[0]} rows", expected=f"{rows} ({why})"
        )


def _biases(flat: FlatConfig, tensors: Shapes, names: list[str], where: object, key: str) -> bool:
    """Whether a group of projections has biases: the tensors decide, all of a group or none.

    SpecForge writes `attention_bias` and ignores it, so its config alone makes no bias; in a speculators config it is
    meant.
    """
    there = [name for name in names if tensors.shape(name) is not None]
    if there and len(there) != len(names):
        missing = next(name for name in names if name not in there)
        raise CheckpointError(
            "a bias is missing", where=f"{where}: {missing}", found=f"absent, beside {there[0]}", expected="all or none"
        )
    if not there and flat.name == "speculators" and flat.layer.get(key) is True:
        raise CheckpointError(f"{key} is true, but a bias is missing", where=f"{where}: {names[0]}", found="absent")
    return bool(there)


def _grouped(flat: FlatConfig, tensors: Shapes, index: int, hidden: int, where: object) -> GQAConfig:
    prefix = f"layers.{index}.self_attn."
    heads = _need(flat, "num_attention_heads", where)
    kv_heads = _need(flat, "num_key_value_heads", where) if flat.layer.get("num_key_value_heads") is not None else heads
    given = flat.layer.get("head_dim") is not None
    head_dim = _need(flat, "head_dim", where) if given else hidden // heads
    if heads % kv_heads or (not given and hidden % heads):
        raise ConfigError(
            "heads do not divide",
            where=f"{where}: num_attention_heads",
            found=f"{heads} heads, {kv_heads} KV heads, hidden_size {hidden}",
        )
    source = "head_dim" if given else "hidden_size / num_attention_heads"
    _rows(
        tensors, f"{prefix}q_proj.weight", heads * head_dim, f"num_attention_heads {heads} x {source} {head_dim}", where
    )
    for name in ("k_proj", "v_proj"):
        _rows(
            tensors,
            f"{prefix}{name}.weight",
            kv_heads * head_dim,
            f"num_key_value_heads {kv_heads} x {source} {head_dim}",
            where,
        )
    normed = [tensors.shape(f"{prefix}{name}.weight") is not None for name in ("q_norm", "k_norm")]
    qwen3 = "qwen3" in str(flat.layer.get("model_type") or "") and flat.name == "speculators"
    if any(normed) != all(normed) or (qwen3 and not all(normed)):
        raise CheckpointError("q_norm or k_norm is missing", where=f"{where}: {prefix}q_norm.weight, k_norm.weight")
    eps = flat.layer.get("rms_norm_eps")
    return GQAConfig(
        heads,
        kv_heads,
        head_dim,
        read_rope(_text_rope(flat), head_dim, interleaved=_interleaved(flat, False, where), where=where),
        qkv_bias=_biases(flat, tensors, [f"{prefix}{n}_proj.bias" for n in "qkv"], where, "attention_bias"),
        output_bias=tensors.shape(f"{prefix}o_proj.bias") is not None,
        qk_norm=all(normed),
        # a value of another type is refused where the draft's own norms are read
        qk_norm_eps=float(eps) if isinstance(eps, int | float) else 1e-6,
        window=_window(flat, index, where),
    )


def _window(flat: FlatConfig, index: int, where: object) -> int | None:
    """The sliding window of a layer: `layer_types` decides where it is given, else `sliding_window` and the flags that
    go with it.
    """
    layer = flat.layer
    size, kinds = layer.get("sliding_window"), layer.get("layer_types")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
        raise ConfigError("must be a whole number above 0, or null", where=f"{where}: sliding_window", found=repr(size))
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) <= index:
            raise ConfigError(
                "must name every layer",
                where=f"{where}: layer_types",
                found=repr(kinds),
                expected=f"{index + 1} or more entries",
            )
        if kinds[index] == "full_attention":
            return None
        if kinds[index] != "sliding_attention" or size is None:
            raise ConfigError(
                "a kind of attention that is not supported",
                where=f"{where}: layer_types",
                found=f"{kinds[index]!r}, sliding_window {size}",
                expected="'full_attention', or 'sliding_attention' with a sliding_window",
            )
        return size
    if size is None or layer.get("use_sliding_window") is False:
        return None
    first = layer.get("max_window_layers") if layer.get("use_sliding_window") else None
    return None if first is not None and index < first else size


def _latent(flat: FlatConfig, tensors: Shapes, where: object) -> MLAConfig:
    """Latent attention of DeepSeek's kind over the 2 x hidden input; rotary channels lie in interleaved pairs."""
    heads = _need(flat, "num_attention_heads", where)
    rank, nope, rope_dim, value = (
        _need(flat, key, where) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank = _need(flat, "q_lora_rank", where) if flat.layer.get("q_lora_rank") is not None else None
    rope = read_rope(
        _text_rope(flat),
        rope_dim,
        interleaved=_interleaved(flat, flat.layer.get("rope_interleave") is not False, where),
        where=where,
    )
    eps = flat.layer.get("rms_norm_eps")
    bias = tensors.shape("layers.0.self_attn.kv_a_proj_with_mqa.bias") is not None
    return MLAConfig(
        heads,
        q_rank,
        rank,
        nope,
        rope_dim,
        value,
        rope,
        mla_scale(nope + rope_dim, rope),
        1e-6 if eps is None else float(eps),
        bias,
    )


def _mlp(flat: FlatConfig, tensors: Shapes, index: int, where: object) -> DenseConfig:
    prefix = f"layers.{index}.mlp."
    width = _need(flat, "intermediate_size", where)
    for name in ("gate_proj", "up_proj"):
        _rows(tensors, f"{prefix}{name}.weight", width, f"intermediate_size {width}", where)
    acts = [flat.layer[key] for key in ("hidden_act", "hidden_activation") if flat.layer.get(key) is not None]
    act = acts[0] if acts else "silu"
    if act not in ACTIVATIONS:
        raise ConfigError(
            "unknown activation", where=f"{where}: hidden_act", found=repr(act), expected=", ".join(ACTIVATIONS)
        )
    bias = _biases(flat, tensors, [f"{prefix}{n}_proj.bias" for n in ("gate", "up", "down")], where, "mlp_bias")
    return DenseConfig(width, bias, act)


def _text_rope(flat: FlatConfig) -> dict[str, Any]:
    """The config with mrope read as the plain rotation: the three positions of a text token are equal."""
    layer = dict(flat.layer)
    for key in ("rope_scaling", "rope_parameters"):
        value = layer.get(key)
        if isinstance(value, dict) and "mrope" in (value.get("rope_type"), value.get("type")):
            layer[key] = {"rope_theta": value["rope_theta"]} if value.get("rope_theta") else None
    return layer


def _interleaved(flat: FlatConfig, default: bool, where: object) -> bool:
    """Whether rotary channels lie in interleaved pairs: as the kind of attention has it, unless our own key says otherwise."""
    value = flat.layer.get("rope_pairing")
    if value not in (None, *PAIRINGS):
        raise ConfigError(
            "unknown pairing", where=f"{where}: rope_pairing", found=repr(value), expected=" or ".join(PAIRINGS)
        )
    return default if value is None else value == "interleaved"


def _report_rope(flat: FlatConfig, rope: RopeConfig, report: LoadReport) -> None:
    said = flat.layer.get("rope_theta") or any(
        isinstance(value := flat.layer.get(key), dict) and value.get("rope_theta")
        for key in ("rope_parameters", "rope_scaling")
    )
    origin = "" if said else " (no rope_theta in the config: the default of this format, not the target's)"
    scaling = "no scaling"
    if rope.kind != "default":
        scaling = f"{rope.kind} scaling, factor {rope.factor:g}"
        scaling += f", original context {rope.original_max_position}" if rope.original_max_position else ""
    report.note(
        "draft",
        f"RoPE: theta {rope.theta:g}{origin}, {scaling}, {'interleaved' if rope.interleaved else 'half'} rotation",
    )
