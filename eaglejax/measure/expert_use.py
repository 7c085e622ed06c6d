"""Whether the experts of a mixture are used: its loss on given texts with them, without them and with others in their
place, and which of them the routers choose."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float64, Int

from eaglejax.errors import ConfigError, PromptError
from eaglejax.models.config import MoEConfig
from eaglejax.models.layers import leaves
from eaglejax.models.moe import watching_routers
from eaglejax.models.rows import causal_step
from eaglejax.models.target import Target
from eaglejax.speculation.programs import pad_rows

RUNS = (1, 4, 16)  # consecutive rows that a plain step, a small tree and a large one verify together
DEAD = 1e-3  # an expert with a smaller share of its layer's choices is as good as absent
# the weights of routed experts, plain or packed, and of those the ones without which an expert gives nothing
ROUTED = re.compile(r"\.mlp\.experts\.(gate_up|down)(_bias)?(\.values|\.scale)?$")
LAST = re.compile(r"\.mlp\.experts\.down(_bias|\.scale)?$")

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ExpertUse:
    """Attributes:
    predicted: tokens that the losses, in nats per token, are means over.
    loss: of the model. loss_without: with routed experts that give nothing. loss_shifted: with each expert at the place
        of the next, in every layer, the routers as they are.
    shares: of each MoE layer, how its choices fall on the experts; they add up to 1.
    touched: for each number of consecutive rows, how many different experts of a layer they choose, on the mean over
        places and layers; without those numbers that no window is long enough for.
    """

    predicted: int
    loss: float
    loss_without: float
    loss_shifted: float
    shares: dict[int, Float64[np.ndarray, " e"]]
    touched: dict[int, float]

    @property
    def dead(self) -> dict[int, list[int]]:
        """The experts with less than `DEAD` of the choices, by layer; layers without any are left out."""
        found = {layer: np.flatnonzero(share < DEAD).tolist() for layer, share in self.shares.items()}
        return {layer: experts for layer, experts in found.items() if experts}


def cut_windows(texts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Texts of token ids in pieces of at most `size`, each a text of its own; a piece of one token predicts nothing and
    is left out.

    Raises ConfigError for a size below 2, PromptError where nothing is left.
    """
    if size < 2:
        raise ConfigError("out of range", where="window", found=size, expected="at least 2 tokens")
    pieces = [list(ids[start : start + size]) for ids in texts for start in range(0, len(ids), size)]
    windows = [piece for piece in pieces if len(piece) > 1]
    if not windows:
        raise PromptError("no text of two tokens or more", where="text", found=f"{len(texts)} texts")
    return windows


def mean_loss(target: Target, windows: Windows) -> float:
    """Nats per token of any model on one device, over all tokens of the windows but the first of each."""
    return _Losses(target, windows).mean(target)


def measure_experts(target: Target, windows: Windows) -> ExpertUse:
    """Three losses and the choices of all routers.

    Arguments:
        target: a mixture of experts, whole on one device.
        windows: token ids, as `cut_windows` gives them.

    Raises ConfigError for a model without experts.
    """
    layers = [index for index, layer in enumerate(target.config.layers) if isinstance(layer.mlp, MoEConfig)]
    if not layers:
        raise ConfigError("has no routed experts", where="model", found=target.config.family)
    losses = _Losses(target, windows)
    counts = {index: np.zeros(_experts(target, index), np.int64) for index in layers}
    touched: dict[int, list[Float64[np.ndarray, " blocks"]]] = {rows: [] for rows in RUNS}

    def watch(chosen: Int[np.ndarray, "l n k"]) -> None:
        for layer, ids in zip(layers, chosen, strict=True):
            counts[layer] += np.bincount(ids.reshape(-1), minlength=len(counts[layer]))
            for rows in RUNS:
                touched[rows].append(distinct(ids, rows, len(counts[layer])))

    loss = losses.mean(target, watch)
    return ExpertUse(
        predicted=losses.predicted,
        loss=loss,
        loss_without=losses.mean(_changed(target, LAST, jnp.zeros_like)),
        loss_shifted=losses.mean(_changed(target, ROUTED, lambda weights: jnp.roll(weights, 1, axis=0))),
        shares={layer: count / count.sum() for layer, count in counts.items()},
        touched={rows: float(np.concatenate(found).mean()) for rows, found in touched.items() if sum(map(len, found))},
    )


def distinct(ids: Int[np.ndarray, "n k"], rows: int, experts: int) -> Float64[np.ndarray, " blocks"]:
    """How many different experts each block of `rows` consecutive rows chooses; what is left at the end is no block."""
    blocks = len(ids) // rows
    chosen = np.zeros((blocks, experts), bool)
    chosen[np.arange(blocks)[:, None], ids[: blocks * rows].reshape(blocks, rows * ids.shape[1])] = True
    return chosen.sum(axis=1).astype(np.float64)


class _Losses:
    """Losses of models of one shape over the same windows: one program for all of them."""

    def __init__(self, target: Target, windows: Windows):
        size = max(len(window) for window in windows)
        self.predicted = sum(len(window) - 1 for window in windows)
        self._rows = [(jnp.asarray(pad_rows(np.asarray(w, np.int32), size)), len(w)) for w in windows]
        self._program = _make_program(target)

    def mean(self, target: Target, watch: Callable[[Int[np.ndarray, "l n k"]], None] | None = None) -> float:
        """Nats per token; `watch` hears of each window what its rows' routers chose."""
        arrays, total = nnx.split(target)[1], 0.0
        for tokens, count in self._rows:
            loss, chosen = self._program(arrays, tokens, jnp.int32(count))
            # sums of float32 are kept as float64 from window to window
            total += float(loss)
            if watch is not None:
                watch(np.asarray(jnp.stack(chosen))[:, :count])
        return total / self.predicted


def _make_program(target: Target) -> Callable[..., Any]:
    graph, _ = nnx.split(target)

    @jax.jit
    def run(
        arrays: Any, tokens: Int[Array, " n"], count: Int[Array, ""]
    ) -> tuple[Float[Array, ""], list[Int[Array, "n k"]]]:
        """The sum of the losses of the tokens before `count`, and what the routers chose for all."""
        model = nnx.merge(graph, arrays)
        step = causal_step(jnp.zeros((1,), jnp.int32), tokens.shape[0])
        with watching_routers() as watched:
            out = model(tokens[None], step, model.empty_caches(1, 0))
        log_p = jax.nn.log_softmax(model.logits(out.hidden)[0, :-1].astype(jnp.float32), axis=-1)
        of_next = jnp.take_along_axis(log_p, tokens[1:, None], axis=-1)[:, 0]
        counts = jnp.arange(1, tokens.shape[0], dtype=jnp.int32) < count
        return -jnp.where(counts, of_next, 0.0).sum(), watched.experts

    return run


def _changed(target: Target, which: re.Pattern[str], change: Callable[[Array], Array]) -> Target:
    """A copy of the model with some weights replaced; the arrays of all others are shared with it."""
    model = nnx.clone(target)
    for path, variable in leaves(model).items():
        if which.search(path):
            variable.set_value(change(variable[...]))
    return model


def _experts(target: Target, layer: int) -> int:
    config = target.config.layers[layer].mlp
    assert isinstance(config, MoEConfig)
    return config.experts
