"""Looks at a divergence again by teacher forcing in float32: both candidates' scores, the filters' edges, the routers' margins."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from eaglejax.config import Sampling
from eaglejax.generation import Generation
from eaglejax.loading import Pair
from eaglejax.measure.rounding import LIMIT, Divergence, edge_distance, examine, first_difference
from eaglejax.models.moe import watching_routers
from eaglejax.models.packed import PackedWeight
from eaglejax.models.rows import causal_step
from eaglejax.models.target import Target
from eaglejax.sharding.layout import fetch, place, weight_specs
from eaglejax.sharding.spmd import on_mesh
from eaglejax.speculation.programs import pad_rows, teacher_bucket
from eaglejax.speculation.sampling import gumbel

# a router's score of the compute dtype, which is at most about 1, is known to this
ROUTER_LIMITS = {"float32": LIMIT, "bfloat16": 2.0**-7}


class Judge:
    """The target of a pair, teacher-forced in float32 over the weights that it serves with."""

    def __init__(self, pair: Pair):
        self._mesh, self._dtype = pair.mesh, jnp.dtype(pair.dtype)
        graph, self._arrays = nnx.split(pair.target)
        axis = pair.target.split.vocab.axis

        def run(arrays, tokens, last):
            exact, margins = _last_row(_in_float32(graph, arrays), tokens, last)
            own = exact if self._dtype == jnp.float32 else _last_row(nnx.merge(graph, arrays), tokens, last)[0]
            return exact, own, margins

        logits = P(None, axis)
        self._program = on_mesh(pair.mesh, run, (weight_specs(self._arrays), P(), P()), [logits, logits, P()])

    def look(self, token_ids: list[int]) -> tuple[Float[np.ndarray, " v"], Float[np.ndarray, " v"], float]:
        """Logits after the last token, in float32 and as the compute dtype gives them, and the smallest router margin there."""
        row = pad_rows(np.asarray(token_ids, np.int32), teacher_bucket(len(token_ids)))[None]
        last = place(np.asarray([len(token_ids) - 1], np.int32), self._mesh)
        exact, own, margins = self._program(self._arrays, place(row, self._mesh), last)
        return fetch(exact)[0], fetch(own)[0], float(fetch(margins).min(initial=math.inf))

    def divergence(self, request: int, plain: Generation, found: Generation, sampling: Sampling) -> Divergence | None:
        """The first divergence of an answer from plain decoding's, examined; None where the ids are the same.

        In float32 the logits are taken as known to 1e-4. In bfloat16 they are known to twice the largest difference between the float32
        logits of this row and its own teacher-forced ones: two passes may each be off by that much.
        """
        index = first_difference(plain.token_ids, found.token_ids)
        if index is None:
            return None
        pair = [tokens[index] if index < len(tokens) else None for tokens in (plain.token_ids, found.token_ids)]
        if pair[0] is None or pair[1] is None:
            return Divergence(request, index, pair[0], pair[1], math.inf, "")
        context = plain.prompt_token_ids + plain.token_ids[:index]
        exact, own, margin = self.look(context)
        hot = sampling.temperature > 0
        scale = sampling.temperature if hot else 1.0
        limit = max(LIMIT, 2 * float(np.abs(exact - own).max()) / scale)
        ids = (pair[0], pair[1])
        gap, cause = examine(exact, noise_of(sampling, len(context), exact.size), sampling, ids, limit)
        if not cause and margin < ROUTER_LIMITS[self._dtype.name]:
            cause = "router"
        edge = edge_distance(exact / np.float32(scale), sampling, ids) if hot else math.inf
        return Divergence(request, index, *ids, gap, cause, edge, margin, limit)


def noise_of(sampling: Sampling, position: int, count: int) -> Float[np.ndarray, " v"]:
    """The noise that every draw at an absolute position shares."""
    seed = sampling.seed or 0
    words = jnp.asarray(np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32))
    return np.asarray(gumbel(words, jnp.asarray([[position]], jnp.int32), count))[0, 0]


def _last_row(target: Target, tokens, last):
    """Logits [1, v] of the row `last`, and its router margins."""
    with watching_routers() as watched:
        step = causal_step(jnp.zeros_like(last), tokens.shape[1])
        out = target(tokens, step, target.empty_caches(1, 0))
    row = jnp.take_along_axis(out.hidden, last[:, None, None], axis=1)
    there = jnp.stack([margin[last[0]] for margin in watched.margins]) if watched.margins else jnp.full((1,), jnp.inf)
    return target.logits(row)[:, 0], there.astype(jnp.float32)


def _in_float32(graph: Any, arrays: Any) -> Target:
    """The same weights, each widened where it is used: there is no second copy of the model."""
    widen = lambda leaf: leaf.astype(jnp.float32) if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf
    target = nnx.merge(graph, jax.tree.map(widen, arrays))
    target.dtype = jnp.dtype(jnp.float32)
    for _, module in nnx.iter_graph(target):
        if isinstance(module, PackedWeight):
            module.dtype = jnp.dtype(jnp.float32)
    return target
