"""Rotary position embedding (RoFormer, arXiv:2104.09864), computed from positions on the fly: there is no table that
could be too short.

Frequencies are built with numpy in float32, operation by operation as the reference libraries do, so that angles at
far positions agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eaglejax.errors import ConfigError
from eaglejax.models.config import RopeConfig

KINDS = ("default", "linear", "llama3", "yarn")
# every key that a RoPE dict of these kinds may carry, and the number types it must have
NUMBERS = (
    "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor",
)  # fmt: skip
OTHER_KEYS = ("rope_type", "type", "truncate", "finetuned")
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
}


def inverse_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated pair, [rotary_dim / 2] float32, and the factor on cos and sin."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    periods = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / periods
    match rope.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / np.float32(rope.factor), 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, periods, rope), yarn_attention_factor(rope)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    length = rope.original_max_position
    wavelengths = np.float32(2 * math.pi) / plain
    ramp = (np.float32(length) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = plain / np.float32(rope.factor)
    between = (1 - ramp) * plain / np.float32(rope.factor) + ramp * plain
    short = wavelengths < length / rope.high_freq_factor
    long = wavelengths > length / rope.low_freq_factor
    return np.where(long, stretched, np.where(short, plain, between)).astype(np.float32)


def _yarn(plain: np.ndarray, periods: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """NTK-by-parts interpolation (YaRN, arXiv:2309.00071 section 3.2)."""
    dim = rope.rotary_dim

    def turns_at(rotations: float) -> float:
        """The channel that turns `rotations` times over the original context."""
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_at(rope.beta_fast), turns_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    interpolated = np.float32(1) / (np.float32(rope.factor) * periods)
    return (interpolated * (1 - keep) + plain * keep).astype(np.float32)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The temperature of YaRN, 0.1 m ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def cos_sin(positions: Int[Array, "b t"], rope: RopeConfig) -> tuple[Float[Array, "b t 1 p"], Float[Array, "b t 1 p"]]:
    """What the pairs of channels of a head are rotated with."""
    frequencies, factor = inverse_frequencies(rope)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles) * np.float32(factor), jnp.sin(angles) * np.float32(factor)


def rotate(x: Float[Array, "b t n c"], positions: Int[Array, "b t"], rope: RopeConfig) -> Float[Array, "b t n c"]:
    """Rotates the first `rotary_dim` channels of every head by its position; the rest passes through.

    Computed in float32, returned in the dtype of x. Equal positions give equal cos and sin in every layer, which XLA
    computes once.
    """
    with jax.named_scope("rope"):
        cos, sin = cos_sin(positions, rope)
        wide = x[..., : rope.rotary_dim].astype(jnp.float32)
        if rope.interleaved:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        if rope.interleaved:
            rotated = jnp.stack(turned, axis=-1).reshape(wide.shape)
        else:
            rotated = jnp.concatenate(turned, axis=-1)
        rotated = rotated.astype(x.dtype)
        if rope.rotary_dim == x.shape[-1]:
            return rotated
        return jnp.concatenate((rotated, x[..., rope.rotary_dim :]), axis=-1)


def mla_scale(width: int, rope: RopeConfig) -> float:
    """Softmax scale of latent attention with query heads of `width`: times mscale(factor, mscale_all_dim) squared
    under a scaled RoPE."""
    scale = width**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    interleaved: bool = False,
    where: object = "config.json",
    default_theta: float = 10000.0,
    default_partial: float = 1.0,
) -> RopeConfig:
    """RoPE of a Hugging Face config, in the old layout or in that of transformers 5.

    Old: `rope_theta` beside `rope_scaling` {type or rope_type, ...}. New: `rope_parameters` {rope_type, rope_theta,
    ...}. Where a config carries both (exporters mirror the one into the other) they must say the same.

    Arguments:
        head_dim: width of a head, of which `partial_rotary_factor` is rotated.
        default_theta, default_partial: what the family takes where the config says nothing.

    Raises:
        ConfigError: a scaling we do not have, a missing key, two values that contradict each other.
    """
    readings = {}
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key)
        if values is None or values == {}:
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(
                "is no RoPE setting", where=f"{where}: {key}", found=repr(values), expected="{...} or null"
            )
        readings[key] = _read_dict(
            config, values, head_dim, interleaved, f"{where}: {key}", default_theta, default_partial
        )
    if not readings:
        return _read_dict(config, {}, head_dim, interleaved, where, default_theta, default_partial)
    first, *others = readings.values()
    if any(other != first for other in others):
        raise ConfigError("rope_scaling and rope_parameters contradict each other", where=where, found=f"{readings}")
    return first


def _read_dict(
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    head_dim: int,
    interleaved: bool,
    where: object,
    default_theta: float,
    default_partial: float,
) -> RopeConfig:
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" and values.get("factor") not in (None, 1, 1.0):
        raise ConfigError(
            "a RoPE factor without a kind of scaling", where=where, found=dict(values), fix='add "rope_type"'
        )
    if kind not in KINDS:
        raise ConfigError(
            "RoPE scaling that is not supported", where=where, found=repr(kind), expected=", ".join(KINDS)
        )
    for key, value in values.items():
        if key not in NUMBERS and key not in OTHER_KEYS:
            raise ConfigError(f"unknown RoPE key {key!r}", where=where, found=repr(value))
    numbers = {key: _number(values, key, where) for key in NUMBERS}
    # one key lies at the top level in some releases and wins there in the reference library
    outer = _number(config, "original_max_position_embeddings", where)
    length = outer or numbers["original_max_position_embeddings"]
    for key in NEEDED[kind]:
        if not (length if key == "original_max_position_embeddings" else numbers[key]):
            raise ConfigError(
                f"RoPE scaling {kind!r} without {key!r}", where=where, found=dict(values), fix=f"add {key}"
            )
    partial = _agreed(config, values, "partial_rotary_factor", where)
    rotary_dim = int(head_dim * (default_partial if partial is None else partial))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(
            "impossible number of rotated channels",
            where=where,
            found=f"{rotary_dim} of {head_dim} (partial_rotary_factor {partial})",
            expected="an even number of at least 2",
        )
    return RopeConfig(
        theta=_theta(config, values, default_theta, where),
        rotary_dim=rotary_dim,
        kind=kind,
        interleaved=interleaved,
        factor=_factor(config, kind, numbers, length, where),
        original_max_position=int(length or 0),
        low_freq_factor=numbers["low_freq_factor"] or 1.0,
        high_freq_factor=numbers["high_freq_factor"] or 4.0,
        beta_fast=numbers["beta_fast"] or 32.0,
        beta_slow=numbers["beta_slow"] or 1.0,
        mscale=numbers["mscale"],
        mscale_all_dim=numbers["mscale_all_dim"],
        attention_factor=numbers["attention_factor"],
        truncate=values.get("truncate") is not False,
    )


def _number(values: Mapping[str, Any], key: str, where: object) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError("is no number that RoPE can use", where=f"{where}: {key}", found=repr(value))
    return float(value)


def _agreed(config: Mapping[str, Any], values: Mapping[str, Any], key: str, where: object) -> float | None:
    """A number that may stand inside the RoPE dict or at the top level; both places must agree."""
    inner, outer = _number(values, key, where), _number(config, key, where)
    if inner is not None and outer is not None and inner != outer:
        raise ConfigError(f"two values of {key}", where=where, found=f"{inner:g} inside, {outer:g} at the top level")
    return outer if inner is None else inner


def _theta(config: Mapping[str, Any], values: Mapping[str, Any], default: float, where: object) -> float:
    """The base; absent is the family's default, zero is nobody's."""
    theta = _agreed(config, values, "rope_theta", where)
    if theta == 0:
        raise ConfigError("is no number that RoPE can use", where=f"{where}: rope_theta", found="0")
    return default if theta is None else theta


def _factor(
    config: Mapping[str, Any], kind: str, numbers: Mapping[str, float | None], length: float | None, where: object
) -> float:
    """The scaling factor; for yarn without one, the ratio of the new context to the original one."""
    factor = numbers["factor"]
    if factor is None and kind == "yarn":
        new = _number(config, "max_position_embeddings", where)
        if new is None or length is None:
            raise ConfigError("RoPE scaling 'yarn' without a factor", where=where, fix="add factor")
        factor = new / length
    if kind != "default" and not factor:
        raise ConfigError("RoPE scaling by zero", where=where, found=repr(factor), expected="a factor of 1 or more")
    return 1.0 if factor is None else factor
