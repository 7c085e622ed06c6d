"""Both attention modules by themselves: against expanded float64 attention, with unequal widths in and out, and with
earlier step rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from target_cases import QUICK_COMPILE

from eaglejax.models.attention import GroupedQueryAttention
from eaglejax.models.config import GQAConfig, MLAConfig, RopeConfig
from eaglejax.models.layers import leaves
from eaglejax.models.mla import LatentAttention
from eaglejax.models.rope import inverse_frequencies
from eaglejax.models.rows import KVRows, Step, causal_step, empty_rows

IN, OUT = 40, 24
GQA = GQAConfig(4, 2, 12, RopeConfig(10000.0, 6), qkv_bias=True, output_bias=True, qk_norm=True, sinks=True, window=3)
MLA = MLAConfig(4, 20, 16, 8, 6, 10, RopeConfig(10000.0, 6, interleaved=True), scale=0.31, bias=True)
CONFIGS = [GQA, MLA, MLAConfig(4, None, 16, 8, 6, 10, RopeConfig(10000.0, 6), scale=0.31)]
EVERY = pytest.mark.parametrize("config", CONFIGS, ids=["gqa", "mla", "mla without query rank"])


def build(config):
    """A module with random weights, norms near 1."""
    kind = LatentAttention if isinstance(config, MLAConfig) else GroupedQueryAttention
    module, rng = kind(config, IN, OUT, dtype=jnp.float32), np.random.default_rng(0)
    for leaf, variable in leaves(module).items():
        noise = rng.standard_normal(variable.shape).astype(np.float32)
        value = 1 + 0.2 * noise if leaf.endswith("scale") else noise * variable.shape[-1] ** -0.5
        variable.set_value(jnp.asarray(value))
    return module


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _run(graph, state, x, step, cache, earlier):
    return nnx.merge(graph, state)(x, step, cache, earlier)


def run(module, x, step, cache, earlier=None):
    return _run(*nnx.split(module), x, step, cache, earlier)


def rotated(x, positions, rope):
    """[t, h, c] in float64, channels paired as the config says."""
    frequencies, _ = inverse_frequencies(rope)
    turn = np.exp(1j * positions[:, None, None] * frequencies.astype(np.float64))
    out, half = x.copy(), rope.rotary_dim // 2
    first = slice(0, rope.rotary_dim, 2) if rope.interleaved else slice(half)
    second = slice(1, rope.rotary_dim, 2) if rope.interleaved else slice(half, rope.rotary_dim)
    pairs = (x[..., first] + 1j * x[..., second]) * turn
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def reference(module, config, x):
    """Causal attention over one sequence, every head expanded, in float64."""
    w = {leaf: np.asarray(variable[...], np.float64) for leaf, variable in leaves(module).items()}
    t, positions, h = len(x), np.arange(len(x)), config.heads
    linear = lambda name, y: y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
    norm = lambda name, y, eps: y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * w[f"{name}.scale"]
    visible = np.tril(np.ones((t, t), bool))
    sinks = np.full(h, -np.inf)
    if isinstance(config, MLAConfig):
        rank, nope, eps = config.kv_lora_rank, config.nope_dim, config.norm_eps
        q = linear("q", x) if config.q_lora_rank is None else linear("q_b", norm("q_a_norm", linear("q_a", x), eps))
        q, compressed = q.reshape(t, h, -1), linear("kv_a", x)
        latent = norm("kv_a_norm", compressed[:, :rank], eps)
        shared = np.repeat(rotated(compressed[:, None, rank:], positions, config.rope), h, axis=1)
        k = np.concatenate((np.einsum("tr,hnr->thn", latent, w["key_up"]), shared), axis=-1)
        v = np.einsum("tr,hvr->thv", latent, w["value_up"])
        q = np.concatenate((q[..., :nope], rotated(q[..., nope:], positions, config.rope)), axis=-1)
        scale = config.scale
    else:
        q = norm("q_norm", linear("q", x).reshape(t, h, -1), config.qk_norm_eps)
        kv = np.einsum("ti,goi->gto", x, w["kv.weight"]) + w["kv.bias"][:, None]
        k, v = (part.reshape(t, config.kv_heads, -1) for part in kv)
        k = rotated(norm("k_norm", k, config.qk_norm_eps), positions, config.rope)
        k, v = (np.repeat(part, h // config.kv_heads, axis=1) for part in (k, v))
        q, scale, sinks = rotated(q, positions, config.rope), config.head_dim**-0.5, w["sinks"]
        visible &= positions[:, None] - positions[None] < config.window
    scores = np.where(visible, np.einsum("thc,shc->hts", q, k) * scale, -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    return linear("out", np.einsum("hts,shc->thc", weights, v).reshape(t, -1))


@EVERY
def test_against_expanded_heads(config):
    module, x = build(config), np.random.default_rng(1).standard_normal((7, IN))
    step = causal_step(jnp.zeros(1, jnp.int32), 7)
    out, rows = run(module, jnp.asarray(x[None].astype(np.float32)), step, empty_rows(config, 1, 0, jnp.float32))
    assert out.shape == (1, 7, OUT)
    assert rows.keys.shape[1] == 7 and (rows.values is None) == isinstance(config, MLAConfig)
    np.testing.assert_allclose(out[0], reference(module, config, x), atol=2e-5, rtol=0)


@EVERY
def test_earlier_rows_and_cache(config):
    """Three rows in the cache, two earlier rows of the same step, two own rows: as one causal pass."""
    module = build(config)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 7, IN)).astype(np.float32))
    want, _ = run(module, x, causal_step(jnp.zeros(1, jnp.int32), 7), empty_rows(config, 1, 0, jnp.float32))
    cache = empty_rows(config, 1, 5, jnp.float32)
    _, first = run(module, x[:, :3], causal_step(jnp.zeros(1, jnp.int32), 3), cache)
    cache = jax.tree.map(lambda whole, rows: whole.at[:, :3].set(rows), cache, first)
    lengths = jnp.full(1, 3, jnp.int32)
    middle, earlier = run(module, x[:, 3:5], causal_step(lengths, 2), cache)
    positions, every = jnp.array([[5, 6]], jnp.int32), jnp.array([[3, 4, 5, 6]], jnp.int32)
    mask = jnp.array([[[True, True, True, False], [True, True, True, True]]])
    last, rows = run(module, x[:, 5:], Step(positions, mask, every, lengths), cache, earlier)
    np.testing.assert_allclose(middle, want[:, 3:5], atol=1e-5, rtol=0)
    np.testing.assert_allclose(last, want[:, 5:], atol=1e-5, rtol=0)
    assert rows.keys.shape[1] == 2


@EVERY
def test_a_sibling_is_not_seen(config):
    """Two rows at the same position that do not see each other give what each gives alone."""
    module = build(config)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 2, IN)).astype(np.float32))
    none, cache = jnp.zeros(1, jnp.int32), empty_rows(config, 1, 0, jnp.float32)
    at = jnp.full((1, 2), 4, jnp.int32)
    out, _ = run(module, x, Step(at, jnp.eye(2, dtype=bool)[None], at, none), cache)
    for row in range(2):
        own = jnp.full((1, 1), 4, jnp.int32)
        alone, _ = run(module, x[:, row : row + 1], Step(own, jnp.ones((1, 1, 1), bool), own, none), cache)
        np.testing.assert_allclose(out[:, row], alone[:, 0], atol=1e-5, rtol=0)
    assert isinstance(cache, KVRows)
