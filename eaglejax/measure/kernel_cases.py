"""Our GPU kernels at the shapes of a model, by themselves: which shapes there are, and for each random inputs, the kernel and its jnp twin.

Values and routing are random. Every layer has buffers of its own, as a model's layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from eaglejax.kernels import project as projections
from eaglejax.kernels import select, tree_attention_shape
from eaglejax.kernels.expert_tables import NOBODY
from eaglejax.kernels.experts import experts
from eaglejax.kernels.experts_gpu_shape import MOST_ROUTED, MOST_ROWS, route_serves, serves, summed
from eaglejax.kernels.tile_candidates import candidates
from eaglejax.kernels.tiles import Key, power_of_two
from eaglejax.kernels.tree_attention import tree_attention
from eaglejax.models.config import DraftConfig, GQAConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.models.layers import project
from eaglejax.models.moe import route
from eaglejax.models.rows import KVRows, Step

MOST_LAYERS, MOST_BYTES = 8, 4e9  # of the buffers of one case


@dataclass(frozen=True)
class Case:
    """One kernel at one shape and number of rows.

    layers: what each layer reads. start: what the first one is given; each is given it again, and waits for the layer before.
    run: the kernel, of such rows and of one layer. twin: the same in jnp, for float32. compared: what of both results is.
    """

    key: Key
    rows: int
    layers: list[Any]
    start: Float[Array, "..."]
    run: Callable[[Any, Any], Any]
    twin: Callable[[Any, Any], Any]
    compared: Callable[[Any], Any] = lambda out: out


def keys_of(config: TargetConfig | DraftConfig, slots: Sequence[int], lengths: Sequence[int]) -> list[Key]:
    """The shapes for which the kernels are asked, each once.

    Arguments:
        config: of the part of one device, weights plain.
        lengths: positions of the caches.
    """
    found: dict[Key, None] = {}
    for index, layer in enumerate(config.layers):
        attention, mixture, d = layer.attention, layer.mlp, config.hidden_size
        if isinstance(attention, MLAConfig):
            shape = (attention.heads, 1, attention.kv_lora_rank + attention.rope_dim, attention.kv_lora_rank, 1)
        else:
            shape = (attention.heads, attention.kv_heads, attention.head_dim, attention.head_dim, 0)
        for each in slots:
            for length in lengths:
                form = select.attention_form(length, None if length % 8 == 0 else "not whole eights")
                if form == "pallas":
                    found[Key("attention", (each, *shape, power_of_two(length)))] = None
        if isinstance(attention, GQAConfig) and not attention.qkv_bias and select.chosen_kernels() == "pallas":
            wide = 2 * d if isinstance(config, DraftConfig) and index == 0 else d
            outs = (attention.heads * attention.head_dim, 2 * attention.kv_heads * attention.head_dim)
            found[Key("project", (wide, *outs))] = None
        if isinstance(mixture, MoEConfig):
            bf16 = [jnp.bfloat16]
            if serves(1, mixture.experts, d, mixture.width, bf16, mixture.expert_activation) is not None:
                continue
            for name in ("gateup", "down"):
                found[Key(name, (mixture.experts, mixture.topk, d, mixture.width))] = None
            if route_serves(1, mixture.experts, d, jnp.bfloat16) is None:
                found[Key("route", (mixture.experts, mixture.topk, d))] = None
    return [key for key in found if candidates(key)]


def rows_for(key: Key, rows: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows to measure with: of a slot for attention, of all slots together for the others; those that are served."""
    if key.kernel == "attention":
        group = key.named()["heads"] // key.named()["kv_heads"]
        return tuple(sorted({t for t in rows if t * group <= tree_attention_shape.MOST_ROWS}))
    most = {"route": MOST_ROUTED, "project": projections.MOST_ROWS}.get(key.kernel, MOST_ROWS)
    return tuple(sorted({t * each for t in rows for each in slots if t * each <= most}))


def make_case(key: Key, rows: int, seed: int = 0) -> Case:
    """On the default device."""
    shape = key.named()
    layers = max(2, min(MOST_LAYERS, int(MOST_BYTES / _layer_bytes(key))))
    keys = iter(jax.random.split(jax.random.key(seed), 8 * layers + 2))
    make = jax.jit(_normal, static_argnums=(1, 2))
    draw = lambda *dims, scale=1.0, dtype=jnp.bfloat16: make(next(keys), dims, dtype) * jnp.asarray(scale, dtype)
    match key.kernel:
        case "attention":
            return _attention(key, rows, layers, draw, seed)
        case "route":
            return _route(key, rows, layers, draw)
        case "project":
            return _project(key, rows, layers, draw)
    return _experts(key, rows, layers, draw, shape)


def _normal(key: Array, dims: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, dims, dtype)


def _layer_bytes(key: Key) -> float:
    shape = key.named()
    match key.kernel:
        case "attention":
            width = shape["width"] + (0 if shape["latent"] else shape["value_width"])
            return 2.0 * shape["slots"] * shape["kv_heads"] * shape["cached"] * width
        case "route":
            return 4.0 * shape["experts"] * shape["d"]
        case "project":
            return 2.0 * shape["d"] * sum(key.shape[1:])
    return 6.0 * shape["experts"] * shape["d"] * shape["f"]


def _attention(key: Key, t: int, layers: int, draw: Any, seed: int) -> Case:
    slots, heads, kv_heads, width, value_width, latent, cached = key.shape
    lengths = jnp.asarray(cached - np.random.default_rng(seed).integers(1, 8, slots), jnp.int32)
    mask = np.broadcast_to(_tree(t, seed), (slots, t, t))
    positions = lengths[:, None] + jnp.asarray(mask.sum(-1) - 1, jnp.int32)
    step = Step(positions, jnp.asarray(mask), positions, lengths)
    unused = (jnp.arange(cached) >= lengths[:, None])[..., None, None]

    def pair(n: int) -> KVRows:
        values = None if latent else draw(slots, n, kv_heads, value_width)
        return KVRows(draw(slots, n, kv_heads, width), values)

    def run(queries: Array, layer: tuple[KVRows, KVRows, Step]) -> Array:
        from eaglejax.kernels.tree_attention_gpu import tree_attention_gpu  # Pallas takes a while to import

        return tree_attention_gpu(queries, *layer, scale=width**-0.5, value_dim=value_width)

    def twin(queries: Array, layer: tuple[KVRows, KVRows, Step]) -> Array:
        with select.kernels("xla"):
            return tree_attention(queries, *layer, scale=width**-0.5, value_dim=value_width)

    spoil = jax.jit(lambda x: jnp.where(unused, jnp.nan, x))  # what is not used may be anything
    made = [(pair(t), jax.tree.map(spoil, pair(cached)), step) for _ in range(layers)]
    return Case(key, t, made, draw(slots, t, heads, width), run, twin)


def _tree(t: int, seed: int) -> Bool[np.ndarray, "t t"]:
    """Each row of a random tree sees itself and those above it."""
    rng, mask = np.random.default_rng(seed), np.eye(t, dtype=bool)
    for row in range(1, t):
        mask[row] |= mask[rng.integers(0, row)]
    return mask


def _experts(key: Key, n: int, layers: int, draw: Any, shape: dict[str, int]) -> Case:
    count, topk, d, f = (shape[name] for name in ("experts", "topk", "d", "f"))

    def layer() -> tuple[Array, ...]:
        best, ids = lax.top_k(draw(n, count, dtype=jnp.float32), topk)
        weights = jax.nn.softmax(best, axis=-1)
        return jnp.sort(ids), weights, draw(count, 2, f, d, scale=d**-0.5), draw(count, d, f, scale=f**-0.5)

    def run(x: Array, layer: tuple[Array, ...]) -> Array:
        from eaglejax.kernels.experts_gpu import experts_gpu

        return summed(experts_gpu(x, *layer), x)

    twin = lambda x, layer: experts(x, *layer, gather=False)
    return Case(key, n, [layer() for _ in range(layers)], draw(n, d), run, twin)


def _route(key: Key, n: int, layers: int, draw: Any) -> Case:
    count, topk, d = key.shape
    config = MoEConfig(count, topk, 64)

    def run(x: Array, weight: Array) -> Array:
        from eaglejax.kernels.route_gpu import route_gpu

        table = route_gpu(x, weight, config=config).table
        return jnp.where(table == NOBODY, 0.0, table)

    # in order of size: scores that nearly tie may be chosen either way
    compared = lambda shares: jnp.sort(shares, axis=0)[-topk:, :n]
    twin = lambda x, weight: route(project(x, weight), config)[1].T
    weights = [draw(count, d, scale=d**-0.5, dtype=jnp.float32) for _ in range(layers)]
    return Case(key, n, weights, draw(n, d), run, twin, compared)


def _project(key: Key, n: int, layers: int, draw: Any) -> Case:
    d, *outs = key.shape

    def run(x: Array, weights: list[Array]) -> tuple[Array, ...]:
        from eaglejax.kernels.project_gpu import project_gpu

        return project_gpu(x, *weights)

    twin = lambda x, weights: tuple(project(x, weight) for weight in weights)
    compared = lambda parts: jnp.concatenate(parts, axis=-1)
    made = [[draw(out, d, scale=d**-0.5) for out in outs] for _ in range(layers)]
    return Case(key, n, made, draw(n, d), run, twin, compared)
