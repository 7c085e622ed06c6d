"""The trained weights of a draft: as a flat dictionary, as a module again, and by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from eaglejax.checkpoint.draft_weights import sources
from eaglejax.models.config import DraftConfig
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves

EMBEDDING, HEAD = "embedding.weight", "head.weight"


def frozen_paths(config: DraftConfig) -> frozenset[str]:
    """Parameters that training leaves alone: the embedding, and a head that is the target's."""
    return frozenset((EMBEDDING,) if config.own_head else (EMBEDDING, HEAD))


def trained_weights(draft: Draft) -> dict[str, Shaped[Array, "..."]]:
    """Parameter path -> value, without what is frozen."""
    return {path: leaf[...] for path, leaf in leaves(draft).items() if path not in frozen_paths(draft.config)}


def frozen_weights(draft: Draft) -> dict[str, Shaped[Array, "..."]]:
    """The other parameters: what `rebuild` takes as `frozen`."""
    return {path: leaf[...] for path, leaf in leaves(draft).items() if path in frozen_paths(draft.config)}


def rebuild(
    config: DraftConfig,
    weights: Mapping[str, Shaped[Array, "..."] | Shaped[np.ndarray, "..."]],
    frozen: Mapping[str, Shaped[Array, "..."]],
    target_ids: Int[Array, " w"],
    dtype: DTypeLike,
) -> Draft:
    """A draft module with these weights, cast to the compute dtype; differentiable in them."""
    draft = nnx.eval_shape(lambda: Draft(config, dtype=dtype))
    graph, params, others = nnx.split(draft, nnx.Param, ...)
    values = {**weights, **frozen}
    flat = [
        (path, variable.replace(jnp.asarray(values[".".join(map(str, path))]).astype(dtype)))
        for path, variable in nnx.to_flat_state(params)
    ]
    rest = [(path, variable.replace(target_ids)) for path, variable in nnx.to_flat_state(others)]
    return nnx.merge(graph, nnx.from_flat_state(flat), nnx.from_flat_state(rest))


def checkpoint_names(
    config: DraftConfig, weights: Mapping[str, Shaped[Array, "..."] | Shaped[np.ndarray, "..."]]
) -> dict[str, Float[np.ndarray, "..."]]:
    """The same arrays, float32, by the tensor names of SafeAILab and SpecForge (`midlayer` is layer 0)."""
    plan = sources(config)
    named: dict[str, np.ndarray] = {}
    for path, value in weights.items():
        names, array = plan[path].names, np.asarray(value, np.float32)
        parts = array if plan[path].stacked else [array]
        for name, part in zip(names, parts, strict=True):
            named[name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name] = np.asarray(
                part
            )
    return named


def first_weights(
    config: DraftConfig, head: Float[np.ndarray, "w d"], norm: Float[np.ndarray, " d"], scales: list[float], seed: int
) -> dict[str, Float[np.ndarray, "..."]]:
    """First weights of a draft whose width is its target's.

    An own head starts as the target's rows of the draft vocabulary, the final norm as the target's; fc passes the
    last capture on, brought to size 1, with a little of the others; projections that write to the stream start
    small. So the first states already lie in the space that the head reads.

    Arguments:
        scales: typical root mean square of each capture.
    """
    rng = np.random.default_rng(seed)
    draft = nnx.eval_shape(lambda: Draft(config, dtype=jnp.float32))
    values: dict[str, np.ndarray] = {}
    for path, leaf in leaves(draft).items():
        if path in frozen_paths(config):
            continue
        if path.endswith(".scale"):
            values[path] = np.ones(leaf.shape, np.float32)
        else:
            small = 0.3 if path.endswith(("attention.out.weight", "mlp.down.weight")) else 1.0
            values[path] = (small * leaf.shape[-1] ** -0.5 * rng.standard_normal(leaf.shape)).astype(np.float32)
    width = config.hidden_size
    parts = [0.1 / scale * width**-0.5 * rng.standard_normal((width, width)) for scale in scales]
    parts[-1] = parts[-1] + np.eye(width) / scales[-1]
    values["fusion.fc.weight"] = np.concatenate(parts, axis=1).astype(np.float32)
    values["norm.scale"] = norm.astype(np.float32)
    if config.own_head:
        values[HEAD] = head.astype(np.float32)
    return values
