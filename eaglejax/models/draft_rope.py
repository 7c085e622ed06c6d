"""RoPE of a draft from its own config, in the old layout (rope_theta, rope_scaling) and the new one (rope_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import RopeConfig
from eaglejax.models.rope import yarn_mscale

PLAIN_THETA = 10000.0
KINDS = ("default", "linear", "llama3", "yarn")
FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
}


def read_rope(layer: Mapping[str, Any], width: int, *, interleaved: bool, where: object) -> RopeConfig:
    """RoPE of heads whose rotated part is `width` wide.

    Arguments:
        layer: a Llama-like config. Without rope_theta anywhere the base is 10000, and nothing is taken from the target.
        where: the config file, for messages.
    Raises ConfigError for unknown kinds, missing or impossible numbers, and places that contradict each other.
    """
    places = {key: _object(layer, key, where) for key in ("rope_parameters", "rope_scaling")}
    theta = _agreed(
        {
            "rope_theta": layer.get("rope_theta"),
            **{f"{key}.rope_theta": place.get("rope_theta") for key, place in places.items()},
        },
        where,
    )
    kinds = {f"{key}.rope_type": place.get("rope_type", place.get("type")) for key, place in places.items()}
    kind = _agreed({key: "default" if value == "mrope" else value for key, value in kinds.items()}, where) or "default"
    if kind not in KINDS:
        raise ConfigError(
            "this kind of RoPE is not supported",
            where=f"{where}: rope_type",
            found=repr(kind),
            expected=", ".join(KINDS),
        )
    # the new layout holds everything; the old one may mirror it
    values: dict[str, Any] = {**places["rope_scaling"], **places["rope_parameters"]}
    numbers = {key: _number(values, key, where) for key in FACTORS[kind]}
    if kind != "default" and numbers["factor"] is None:
        raise ConfigError(
            "RoPE scaling without a factor",
            where=f"{where}: rope_scaling.factor",
            found="absent",
            expected="a number above 0",
        )
    given = {key: value for key, value in numbers.items() if value is not None}
    part = layer.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise ConfigError(
            "a draft that rotates a part of each head is not supported",
            where=f"{where}: partial_rotary_factor",
            found=part,
        )
    original = values.get("original_max_position_embeddings") or layer.get("original_max_position_embeddings")
    original = original or layer.get("max_position_embeddings") or 0
    if kind in ("llama3", "yarn") and original <= 0:
        raise ConfigError(
            "RoPE scaling needs the original context",
            where=f"{where}: original_max_position_embeddings",
            found="absent",
        )
    return RopeConfig(
        PLAIN_THETA if theta is None else float(theta),
        width,
        kind,
        interleaved=interleaved,
        original_max_position=int(original) if kind in ("llama3", "yarn") else 0,
        truncate=values.get("truncate", True) is not False,
        **given,
    )


def mla_scale(width: int, rope: RopeConfig) -> float:
    """Softmax scale of latent attention: width^-0.5, times the square of YaRN's temperature for mscale_all_dim (DeepSeek-V2/V3)."""
    temperature = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.kind == "yarn" and rope.mscale_all_dim else 1.0
    return width**-0.5 * temperature * temperature


def _object(layer: Mapping[str, Any], key: str, where: object) -> dict[str, Any]:
    value = layer.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError("must be an object or null", where=f"{where}: {key}", found=repr(value))
    return value or {}


def _agreed(places: Mapping[str, Any], where: object) -> Any:
    """The one value that is written in one or more places, or None."""
    given = {key: value for key, value in places.items() if value is not None}
    if len(set(given.values())) > 1:
        raise ConfigError("RoPE is written in several places that contradict each other", where=where, found=str(given))
    return next(iter(given.values()), None)


def _number(values: Mapping[str, Any], key: str, where: object) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value < 0
        or (value == 0 and "mscale" not in key)
    ):
        raise ConfigError("must be a number above 0", where=f"{where}: rope_scaling.{key}", found=repr(value))
    return float(value)
