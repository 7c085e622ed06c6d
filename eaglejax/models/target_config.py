"""From a released config.json to a `TargetConfig`, by the data of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.models.families import FAMILIES, Family, GQATraits, Key, MoETraits
from eaglejax.models.hf_config import REQUIRED, HFConfig, doubtful_outside
from eaglejax.models.layers import ACTIVATIONS
from eaglejax.models.rope import mla_scale, read_rope

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# far beyond any release; every layer is built in Python
MOST_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class TargetReading:
    """A config as read.

    For the load report: `assumed`, defaults taken for absent keys; `unread`, keys without a meaning here; `doubtful`, "key = value" of
    unknown keys that might have one.
    `quantisation`: the configs, innermost first and each with its name, in which `checkpoint.quantised` looks for a quantization_config.
    """

    config: TargetConfig
    family: Family
    assumed: tuple[str, ...]
    unread: tuple[str, ...]
    doubtful: tuple[str, ...] = ()
    quantisation: tuple[tuple[Mapping[str, Any], object], ...] = ()


def find_family(values: Mapping[str, Any], where: object) -> Family:
    """The family that `model_type` and `architectures` name; ConfigError where none or two are named."""
    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    known = "; ".join(f"{family.name} ({', '.join(family.architectures)})" for family in FAMILIES)
    found = f"model_type {model_type!r}, architectures {architectures!r}"
    by_type = [family for family in FAMILIES if model_type in family.model_types]
    if model_type is not None and not by_type:
        raise ConfigError("a model family that EagleJax does not know", where=where, found=found, expected=known)
    fits = [f for f in by_type or FAMILIES if not architectures or set(architectures) <= set(f.architectures)]
    if by_type and not fits:
        expected = " or ".join(by_type[0].architectures)
        what = "model_type and architectures name different models"
        if any("eagle" in str(name).lower() for name in architectures):
            what = "this is a draft, not a target"
        raise ConfigError(what, where=where, found=found, expected=expected)
    if not fits or (model_type is None and not architectures):
        raise ConfigError("a model family that EagleJax does not know", where=where, found=found, expected=known)
    return fits[0]


def read_target_config(
    values: Mapping[str, Any], *, where: object = "config.json", generation: Mapping[str, Any] | None = None
) -> TargetReading:
    """Reads a config.json.

    Arguments:
        values: the JSON object; in multimodal models the text part is found within.
        where: what to call the file in messages.
        generation: generation_config.json, whose eos_token_id wins over that of the config.

    Raises:
        ConfigError: an unknown family, a missing or impossible value, a setting that would change the forward pass
        and that we do not have.
    """
    family = find_family(values, where)
    outer, outer_where = values, where
    if family.text_config:
        inner = values.get("text_config")
        if not isinstance(inner, Mapping):
            raise ConfigError("'text_config' is missing", where=where, found=repr(inner), expected="{...}")
        values, where = inner, f"{where}: text_config"
    hf = HFConfig(values, where)
    for key, only in (("is_causal", True), *family.must_be):
        if (found := hf.get(key, type(only), only)) != only:
            raise hf.refuse(key, found, repr(only))
    hf.mark(*family.ignored, *ROPE_KEYS)
    count = hf.count("num_hidden_layers")
    if count > MOST_LAYERS:
        raise hf.refuse("num_hidden_layers", count, f"at most {MOST_LAYERS}")
    attention = _attention(hf, family, count)
    mlps = _mlps(hf, family, count)
    tokens = (generation or {}, values, outer)
    config = TargetConfig(
        family=family.name,
        vocab_size=hf.count("vocab_size"),
        hidden_size=hf.count("hidden_size"),
        layers=tuple(LayerConfig(a, m) for a, m in zip(attention, mlps, strict=True)),
        norm_eps=_eps(hf),
        tie_embeddings=_tied(hf, outer, outer_where),
        max_position=hf.count("max_position_embeddings"),
        eos_token_ids=_eos(tokens, where),
        bos_token_id=next((t["bos_token_id"] for t in tokens if isinstance(t.get("bos_token_id"), int)), None),
    )
    unread = hf.unread()
    doubtful = hf.doubtful + (doubtful_outside(outer, values) if family.text_config else [])
    places = ((values, where),) if values is outer else ((values, where), (outer, outer_where))
    return TargetReading(config, family, tuple(hf.assumed), tuple(unread), tuple(doubtful), places)


def _tied(hf: HFConfig, outer: Mapping[str, Any], where: object) -> bool:
    """Whether head and embedding are one; the outer config of a multimodal model has the last word."""
    inner = hf.get("tie_word_embeddings", bool, False)
    return HFConfig(outer, where).get("tie_word_embeddings", bool, inner)


def _eos(tokens: tuple[Mapping[str, Any], ...], where: object) -> tuple[int, ...]:
    for values in tokens:
        found = values.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(
                "is no token id or list of them", where=f"{where}: eos_token_id", found=repr(found), expected="ids"
            )
        return tuple(ids)
    return ()


def _value(hf: HFConfig, spec: Any, kind: type) -> Any:
    """A trait: fixed by the family, or read from the config."""
    return hf.get(spec.name, kind, spec.default, *spec.aliases) if isinstance(spec, Key) else spec


def _activation(hf: HFConfig, allowed: tuple[str, ...]) -> str:
    name = hf.get("hidden_act", str, "silu", "hidden_activation")
    if name not in allowed:
        raise hf.refuse("hidden_act", name, " or ".join(allowed))
    return name


# ---- attention


def _eps(hf: HFConfig) -> float:
    value = hf.get("rms_norm_eps", float)
    if not 0 < value < 1:
        raise hf.refuse("rms_norm_eps", value, "a number above 0 and below 1")
    return value


def _attention(hf: HFConfig, family: Family, count: int) -> list[GQAConfig | MLAConfig]:
    if isinstance(family.attention, GQATraits):
        windows = _windows(hf, family.attention, count)
        return [_gqa(hf, family.attention, window) for window in windows]
    return [_mla(hf, family.attention.theta)] * count


def _gqa(hf: HFConfig, traits: GQATraits, window: int | None) -> GQAConfig:
    heads = hf.count("num_attention_heads")
    kv_heads = hf.count("num_key_value_heads", heads if traits.kv_heads_default else REQUIRED)
    if heads % kv_heads:
        raise ConfigError(
            "query heads do not divide among key/value heads", where=hf.where, found=f"{heads} and {kv_heads}"
        )
    default, hidden = REQUIRED, hf.count("hidden_size")
    if traits.head_dim == "given or hidden/heads" and hidden % heads == 0:
        default = hidden // heads
    head_dim = hf.count("head_dim", default)
    partial = traits.partial_rotary
    rope = read_rope(
        hf.values,
        head_dim,
        where=hf.where,
        default_theta=traits.theta,
        default_partial=1.0 if partial is None else partial,
    )
    if partial is None and rope.rotary_dim != head_dim:
        raise hf.refuse("partial_rotary_factor", rope.rotary_dim / head_dim, "1.0 in this family")
    _note_theta(hf, rope.theta)
    return GQAConfig(
        heads,
        kv_heads,
        head_dim,
        rope,
        qkv_bias=_value(hf, traits.qkv_bias, bool),
        output_bias=_value(hf, traits.output_bias, bool),
        qk_norm=_value(hf, traits.qk_norm, bool),
        qk_norm_eps=_eps(hf),
        sinks=traits.sinks,
        window=window,
    )


def _windows(hf: HFConfig, traits: GQATraits, count: int) -> list[int | None]:
    """The window of each layer, None where it sees everything."""
    types = hf.get("layer_types", list, None)
    if types is not None and (len(types) != count or not set(types) <= {FULL, SLIDING}):
        raise hf.refuse("layer_types", types, f"{count} times {FULL!r} or {SLIDING!r}")
    if traits.window == "none" or ("used" in traits.window and not hf.get("use_sliding_window", bool, False)):
        if types is not None and SLIDING in types:
            raise hf.refuse(
                "layer_types", types, "no windows here: the family has none, or use_sliding_window is false"
            )
        if traits.window != "none":
            hf.mark("sliding_window")
        return [None] * count
    width = hf.get("sliding_window", int, None)
    if "sliding_window" not in hf.values and traits.window_default:
        width = hf.assume("sliding_window", int, traits.window_default)
    if traits.window in ("all", "all if used"):
        if types is not None and set(types) != {SLIDING if width else FULL}:
            raise hf.refuse("layer_types", types, "one kind of attention in all layers of this family")
        types = [SLIDING if width else FULL] * count
    elif types is None and traits.window == "later layers if used":
        first = hf.get("max_window_layers", int)
        types = [SLIDING if layer >= first and width else FULL for layer in range(count)]
    elif types is None and traits.window == "layer types":
        hf.assumed.append("layer_types is absent: windows in every other layer, beginning with the first")
        types = [FULL if layer % 2 else SLIDING for layer in range(count)]
    elif types is None:
        expected = "layer_types beside it: releases disagree on which layers have windows"
        raise hf.refuse("use_sliding_window", True, expected)
    if SLIDING in types and (width is None or width < 1):
        raise ConfigError("layers with a window need one", where=f"{hf.where}: sliding_window", found=width)
    return [width if kind == SLIDING else None for kind in types]


def _mla(hf: HFConfig, theta: float) -> MLAConfig:
    nope, rope_dim = hf.count("qk_nope_head_dim"), hf.count("qk_rope_head_dim")
    interleaved = hf.get("rope_interleave", bool, True)
    rope = read_rope(hf.values, rope_dim, interleaved=interleaved, where=hf.where, default_theta=theta)
    if rope.rotary_dim != rope_dim:
        raise hf.refuse("partial_rotary_factor", rope.rotary_dim / rope_dim, "1.0 in this family")
    _note_theta(hf, rope.theta)
    rank = hf.get("q_lora_rank", int, None)
    if rank is None and "q_lora_rank" not in hf.values:
        raise ConfigError("'q_lora_rank' is missing", where=hf.where, expected="a rank, or null for none")
    return MLAConfig(
        hf.count("num_attention_heads"),
        rank,
        hf.count("kv_lora_rank"),
        nope,
        rope_dim,
        hf.count("v_head_dim"),
        rope,
        mla_scale(nope + rope_dim, rope),
        bias=hf.get("attention_bias", bool, False),
    )


def _note_theta(hf: HFConfig, theta: float) -> None:
    places = (hf.values, hf.values.get("rope_scaling") or {}, hf.values.get("rope_parameters") or {})
    line = f"rope_theta is absent: {theta:g}, as the family has it"
    if all(place.get("rope_theta") is None for place in places) and line not in hf.assumed:
        hf.assumed.append(line)


# ---- MLP and experts


def _mlps(hf: HFConfig, family: Family, count: int) -> list[DenseConfig | MoEConfig]:
    traits = family.moe
    sparse = [False] * count if traits is None else _sparse_layers(hf, traits, count)
    allowed = ACTIVATIONS if traits is None else ("silu", "swish")
    activation = _activation(hf, allowed)
    hf.mark("intermediate_size")
    bias = _value(hf, family.mlp_bias, bool)
    dense = None if all(sparse) else DenseConfig(hf.count("intermediate_size"), bias, activation)
    moe = _moe(hf, traits) if traits is not None and any(sparse) else None
    mlps = [moe if is_sparse else dense for is_sparse in sparse]
    if traits is not None and moe is None:
        # no layer has experts, so what the config says of them has no effect
        hf.mark(*(value.name for value in vars(traits).values() if isinstance(value, Key)))
    return [mlp for mlp in mlps if mlp is not None]


def _sparse_layers(hf: HFConfig, traits: MoETraits, count: int) -> list[bool]:
    """Which layers have experts."""
    match traits.placement:
        case "all":
            return [True] * count
        case "after first dense":
            first = hf.get("first_k_dense_replace", int)
            every = hf.get("moe_layer_freq", (int, list), 1)
            if isinstance(every, list):
                if len(every) != count or not set(every) <= {0, 1}:
                    raise hf.refuse("moe_layer_freq", every, f"a number, or {count} of 0 and 1")
                return [bool(on) and layer >= first for layer, on in enumerate(every)]
            if every < 1:
                raise hf.refuse("moe_layer_freq", every, "at least 1")
            return [layer >= first and layer % every == 0 for layer in range(count)]
        case "sparse step":
            step = hf.count("decoder_sparse_step", 1)
            dense = hf.get("mlp_only_layers", list, [])
            experts = hf.get(traits.experts.name, int, REQUIRED, *traits.experts.aliases)
            return [experts > 0 and (layer + 1) % step == 0 and layer not in dense for layer in range(count)]


def _moe(hf: HFConfig, traits: MoETraits) -> MoEConfig:
    experts, topk = _value(hf, traits.experts, int), _value(hf, traits.topk, int)
    groups, kept = _value(hf, traits.groups, int), _value(hf, traits.topk_groups, int)
    sizes = f"{experts} experts in {groups} groups, {kept} groups and {topk} experts chosen"
    possible = experts >= 1 and groups >= 1 and 1 <= kept <= groups and experts % groups == 0
    if possible:
        size = experts // groups
        possible = 1 <= topk <= kept * size and (groups == 1 or size >= 2)
    if not possible:
        raise ConfigError("impossible numbers of experts", where=hf.where, found=sizes)
    shared_count = _value(hf, traits.shared_count, int)
    # a family without shared experts has width 0
    shared = shared_count * _value(hf, traits.shared_width, int) if shared_count else 0
    return MoEConfig(
        experts=experts,
        topk=topk,
        width=hf.count(traits.width.name),
        score=traits.score,
        normalise=_value(hf, traits.normalise, bool),
        scaling=_value(hf, traits.scaling, float),
        groups=groups,
        topk_groups=kept,
        correction_bias=traits.correction_bias,
        router_bias=traits.router_bias,
        expert_bias=traits.expert_bias,
        expert_activation=traits.expert_activation,
        shared_width=shared,
        shared_gate=traits.shared_gate and shared > 0,
    )
