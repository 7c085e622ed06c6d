"""Rotary positions in float64: plain, llama3 and yarn, in both config layouts, for half and interleaved pairing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Rope:
    """`inv_freq` in radians a position; `scale` multiplies cos and sin; `softmax_factor` the softmax scale (MLA)."""

    inv_freq: Float[np.ndarray, " c2"]
    scale: float = 1.0
    interleaved: bool = False
    softmax_factor: float = 1.0


def rotate(x: Float[np.ndarray, "t h c"], positions: Int[np.ndarray, " t"], rope: Rope) -> Float[np.ndarray, "t h c"]:
    """Rotates pairs (i, i + c/2), or (2i, 2i+1) when interleaved, by position times inv_freq[i]."""
    angle = positions[:, None, None] * rope.inv_freq
    cos, sin = np.cos(angle) * rope.scale, np.sin(angle) * rope.scale
    half = x.shape[-1] // 2
    even, odd = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    turned = even * cos - odd * sin, odd * cos + even * sin
    if rope.interleaved:
        return np.stack(turned, axis=-1).reshape(x.shape)
    return np.concatenate(turned, axis=-1)


def rope_settings(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(base, scaling) from the newer `rope_parameters` or the older `rope_theta` + `rope_scaling`; else base 10000.

    `rope_parameters` wins where both are present. The kind may be named `rope_type` or `type`.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    return float(base), scaling


def read_rope(config: dict[str, Any], width: int, interleaved: bool) -> Rope:
    base, scaling = rope_settings(config)
    inv_freq = base ** (-np.arange(0, width, 2) / width)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(inv_freq, interleaved=interleaved)
    if kind == "llama3":
        return Rope(_llama3(inv_freq, scaling), interleaved=interleaved)
    if kind != "yarn":
        raise ValueError(f"rope kind {kind!r} is not known to this reference")
    factor = scaling["factor"]
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    scale = yarn_mscale(factor, 1.0)
    if mscale and mscale_all:
        scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    softmax_factor = yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0
    return Rope(_yarn(inv_freq, scaling, base, width), scale, interleaved, softmax_factor)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(inv_freq: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, the band between is interpolated."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    out = []
    for freq in inv_freq:
        wavelength = 2 * math.pi / freq
        if wavelength > original / low:
            out.append(freq / factor)
        elif wavelength < original / high:
            out.append(freq)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * freq / factor + smooth * freq)
    return np.array(out)


def _yarn(inv_freq: np.ndarray, scaling: dict[str, Any], base: float, width: int) -> np.ndarray:
    """Frequencies that turn more than beta_fast times in the original length are kept, less than beta_slow divided."""
    original = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), width - 1)
    span = (high - low) or 0.001
    divided = np.clip((np.arange(width // 2) - low) / span, 0.0, 1.0)
    return inv_freq / scaling["factor"] * divided + inv_freq * (1 - divided)
