"""Cases with a peer's answers, and a plain way to run a target: prefill in chunks, then one token at a time."""

import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from eaglejax.checkpoint.target_loader import load_target
from eaglejax.models.moe import MoE
from eaglejax.models.rows import KVRows, causal_step
from eaglejax.models.target import Target

STORED = Path(__file__).parents[1] / "data" / "targets"
# the programs run for milliseconds, so most of a test would be LLVM at work
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def folders() -> list[Path]:
    """Stored cases, and all golden targets that are not quantised where EAGLEJAX_GOLDEN names their folder."""
    found = sorted(path.parent for path in STORED.glob("*/expected.safetensors"))
    if golden := os.environ.get("EAGLEJAX_GOLDEN"):
        found += [path for path in sorted(Path(golden).glob("target_*")) if not path.name.endswith(("_fp8", "_int4"))]
    return found


def ints(values: np.ndarray) -> jax.Array:
    return jnp.asarray(np.asarray(values).astype(np.int32))


@cache
def expected(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "expected.safetensors")


@dataclass(frozen=True)
class Case:
    """A loaded target with everything computed of its prompt and continuation."""

    target: Target
    want: dict[str, np.ndarray]
    logits: np.ndarray
    captured: tuple[np.ndarray, ...]
    routes: dict[int, tuple[np.ndarray, np.ndarray]]


@cache
def run_case(folder: Path) -> Case:
    """Teacher-forces prompt and greedy continuation together, without a cache."""
    target, want = load_target(folder), expected(folder)
    tokens = np.concatenate((want["input_ids"], want["greedy_tokens"][:, :-1]), axis=1)
    logits, captured, routes = teacher_forced(target, ints(tokens))
    return Case(target, want, logits, captured, routes)


def teacher_forced(target: Target, tokens: jax.Array):
    """Logits, every boundary, and the routes of every layer with experts, without any cache."""
    graph, state = nnx.split(target)
    return jax.tree.map(np.asarray, _teacher_forced(graph, state, tokens))


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _teacher_forced(graph, state, tokens):
    target = nnx.merge(graph, state)
    batch, rows = tokens.shape
    step, caches = causal_step(jnp.zeros(batch, jnp.int32), rows), target.empty_caches(batch, 0)
    out = target(tokens, step, caches, tuple(range(target.config.num_layers + 1)))
    routes = {}
    for index, (layer, cache_) in enumerate(zip(target.layers, caches, strict=True)):
        if isinstance(layer.mlp, MoE):
            mixed, _ = layer.attention(layer.input_norm(out.captured[index]), step, cache_)
            normed = layer.post_norm(out.captured[index] + mixed)
            routes[index] = tuple(
                part.reshape(batch, rows, -1) for part in layer.mlp.router(normed.reshape(batch * rows, -1))
            )
    return target.logits(out.hidden), out.captured, routes


@partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _advance(graph, state, tokens, lengths, caches):
    target = nnx.merge(graph, state)
    out = target(tokens, causal_step(lengths, tokens.shape[1]), caches)
    write = jax.vmap(lambda cache, rows, start: jax.lax.dynamic_update_slice(cache, rows, (start, 0, 0)))
    written = [
        KVRows(
            write(old.keys, rows.keys, lengths),
            None if rows.values is None or old.values is None else write(old.values, rows.values, lengths),
        )
        for old, rows in zip(caches, out.rows, strict=True)
    ]
    return target.logits(out.hidden), written


def advance(target: Target, tokens, lengths, caches):
    """Rows after the cached ones; gives their logits, and the caches with the rows written."""
    graph, state = nnx.split(target)
    logits, caches = _advance(graph, state, ints(tokens), ints(lengths), caches)
    return np.asarray(logits), caches


def spoiled_caches(target: Target, batch: int, rows: int) -> list[KVRows]:
    """Caches full of NaN: whatever is used before it is written shows."""
    spoil = lambda leaf: None if leaf is None else jnp.full_like(leaf, jnp.nan)
    return [KVRows(spoil(cache.keys), spoil(cache.values)) for cache in target.empty_caches(batch, rows)]
