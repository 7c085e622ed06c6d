"""Rotary embedding: both config layouts, every scaling against formulas in float64, far positions, refusals."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.models.config import RopeConfig
from eaglejax.models.rope import inverse_frequencies, mla_scale, read_rope, rotate, yarn_attention_factor

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512
)
LINEAR = dict(rope_type="linear", factor=3.0)


def old(theta, scaling):
    renamed = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    return dict(rope_theta=theta, rope_scaling=renamed or None)


def frequencies64(theta, dim, scaling):
    """The published formulas, in float64."""
    plain = theta ** -(np.arange(0, dim, 2) / dim)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return plain / scaling["factor"]
    if kind == "llama3":
        length, turns = scaling["original_max_position_embeddings"], plain / (2 * np.pi)
        smooth = np.clip((length * turns - 1.0) / (4.0 - 1.0), 0, 1)
        return plain * (smooth + (1 - smooth) / scaling["factor"])
    if kind == "yarn":
        length = scaling["original_max_position_embeddings"]
        at = lambda turns: dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = at(scaling.get("beta_fast", 32)), at(scaling.get("beta_slow", 1))
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return plain * (1 - ramp) + plain / scaling["factor"] * ramp
    return plain


SCALINGS = [
    {},
    LINEAR,
    LLAMA3,
    YARN,
    YARN | dict(truncate=False, beta_fast=16, beta_slow=2),
    YARN | dict(beta_fast=1, beta_slow=1),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3", "yarn", "yarn exact", "yarn step"])
def test_layouts_and_frequencies(scaling):
    theta = 500000.0
    readings = [
        read_rope(old(theta, scaling), 64),
        read_rope(dict(rope_parameters=scaling | dict(rope_theta=theta)), 64),
        read_rope(dict(rope_theta=theta, rope_parameters=scaling or None), 64),
        read_rope(old(theta, scaling) | dict(rope_parameters=scaling | dict(rope_theta=theta)), 64),
    ]
    if scaling:
        readings.append(read_rope(dict(rope_scaling=scaling | dict(rope_theta=theta)), 64))
    assert all(reading == readings[0] for reading in readings)
    got, factor = inverse_frequencies(readings[0])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, frequencies64(theta, 64, scaling), rtol=2e-6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1 if scaling.get("rope_type") == "yarn" else 1.0)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation(interleaved, rotary_dim):
    """Position after position as complex numbers, far beyond any table."""
    rope = RopeConfig(10000.0, rotary_dim, interleaved=interleaved)
    positions = np.array([[0, 1, 100, 3000, 40000]])
    x = np.random.default_rng(0).standard_normal((1, 5, 3, 16)).astype(np.float32)
    got = np.asarray(rotate(jnp.asarray(x), jnp.asarray(positions.astype(np.int32)), rope))
    angle = positions[0][:, None, None] * frequencies64(10000.0, rotary_dim, {})
    half = rotary_dim // 2
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(half), slice(half, rotary_dim))
    )
    turned = (x[0, ..., first] + 1j * x[0, ..., second]) * np.exp(1j * angle)
    # float32 holds an angle of 40000 to 0.002
    atol = 6e-8 * positions[0][:, None, None] * 4 + 1e-6
    assert (np.abs(got[0, ..., first] - turned.real) <= atol).all()
    assert (np.abs(got[0, ..., second] - turned.imag) <= atol).all()
    np.testing.assert_array_equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_bfloat16_rows_keep_their_dtype():
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    assert rotate(x, jnp.zeros((1, 2), jnp.int32), RopeConfig(10000.0, 8)).dtype == jnp.bfloat16


def test_no_theta_is_ten_thousand():
    assert read_rope({}, 8) == RopeConfig(10000.0, 8)
    assert read_rope({}, 8, default_theta=1e6).theta == 1e6
    assert read_rope(dict(rope_theta=None, rope_scaling={}), 8).theta == 10000.0


def test_partial_rotation():
    assert read_rope({}, 12, default_partial=0.5).rotary_dim == 6
    assert read_rope(dict(partial_rotary_factor=0.25), 32, default_partial=0.5).rotary_dim == 8
    new = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
    assert read_rope(new, 32).rotary_dim == 16


def test_yarn_factors():
    read = lambda **more: read_rope(dict(rope_scaling=YARN | dict(factor=40.0) | more), 64)
    ln = math.log(40)
    assert yarn_attention_factor(read()) == pytest.approx(0.1 * ln + 1)
    assert yarn_attention_factor(read(mscale=1.0, mscale_all_dim=1.0)) == 1.0
    assert yarn_attention_factor(read(mscale=0.7, mscale_all_dim=1.3)) == pytest.approx(
        (0.07 * ln + 1) / (0.13 * ln + 1)
    )
    assert yarn_attention_factor(read(mscale=0.7)) == pytest.approx(0.1 * ln + 1)
    assert yarn_attention_factor(read(attention_factor=1.25, mscale=2.0, mscale_all_dim=1.0)) == 1.25
    assert mla_scale(192, read()) == pytest.approx(192**-0.5)
    assert mla_scale(192, read(mscale=1.0, mscale_all_dim=1.0)) == pytest.approx(192**-0.5 * (0.1 * ln + 1) ** 2)
    assert mla_scale(192, RopeConfig(1e4, 64, mscale_all_dim=1.0)) == pytest.approx(192**-0.5)


def test_yarn_factor_from_the_context():
    config = dict(rope_scaling=YARN | dict(factor=None), max_position_embeddings=8192)
    assert read_rope(config, 64).factor == 8.0


def test_original_context_at_the_top_level():
    scaling = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    config = dict(rope_scaling=scaling, original_max_position_embeddings=777)
    assert read_rope(config, 64).original_max_position == 777


@pytest.mark.parametrize(
    "config, word",
    [
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
        (dict(rope_scaling=dict(type="longrope", short_factor=[1.0], long_factor=[2.0])), "longrope"),
        (dict(rope_parameters=dict(rope_type="mrope")), "mrope"),
        (dict(rope_scaling=dict(type="linear")), "factor"),
        (dict(rope_scaling=dict(type="yarn", factor=4.0)), "original_max_position_embeddings"),
        (dict(rope_scaling=LLAMA3 | dict(low_freq_factor=None)), "low_freq_factor"),
        (dict(rope_scaling=YARN | dict(factor=None)), "factor"),
        (dict(rope_scaling=LINEAR | dict(warp=2)), "warp"),
        (dict(rope_scaling=LINEAR | dict(factor="3")), "factor"),
        (dict(rope_scaling=LINEAR | dict(factor=0)), "factor"),
        (dict(rope_scaling="linear"), "rope_scaling"),
        (dict(rope_theta=1e4, rope_parameters=dict(rope_theta=1e6)), "rope_theta"),
        (dict(rope_scaling=LINEAR, rope_parameters=YARN), "contradict"),
        (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "full_attention"),
        (dict(partial_rotary_factor=0.3), "rotated channels"),
        (dict(rope_theta=-1.0), "rope_theta"),
    ],
)
def test_refusals(config, word):
    with pytest.raises(ConfigError, match=word):
        read_rope(config, 10, where="config.json")
