"""The training loop's programs: target features, one optimiser step, and what the draft would draft on given text.

Everything here is a pure function of arrays; files, clocks and printing belong to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from eaglejax.errors import ConfigError
from eaglejax.models.config import DraftConfig
from eaglejax.models.rows import Step
from eaglejax.models.target import Target
from eaglejax.training.int8 import as_exported
from eaglejax.training.losses import Objective
from eaglejax.training.ttt import Text, causal_within, teach, ttt
from eaglejax.training.weights import EMBEDDING, HEAD, rebuild

Optimiser = Literal["adamw", "muon"]
OPTIMISERS: tuple[Optimiser, ...] = ("adamw", "muon")


@dataclass(frozen=True)
class TrainSettings:
    """How a draft is trained.

    unroll: drafted steps per place. decay: weight of step j is decay ** j. clip: global norm of the gradient.
    accumulate: batches whose mean gradient makes one optimiser step.
    warmup: share of the run over which the rate rises. final: share of the peak rate at the end of the cosine.
    objective: the loss of a place (`ttt.ttt`).
    optimiser: "adamw", or "muon": matrices move along their momentum made orthogonal (Jordan et al. 2024), with updates of
        the size that Adam's have (arXiv:2502.16982), so that the same rates serve both; vectors by Adam.
    int8: whether the step sees the matrices as an int8 export rounds them; their gradients go straight through.
    """

    unroll: int = 7
    decay: float = 0.8
    rate: float = 1e-3
    warmup: float = 0.02
    final: float = 0.02
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    compute_dtype: str = "bfloat16"
    accumulate: int = 1
    objective: Objective = "entropy"
    optimiser: Optimiser = "adamw"
    int8: bool = False

    def rate_at(self, progress: float) -> float:
        """The learning rate at a share of the run in [0, 1]: linear rise, then cosine."""
        if progress < self.warmup:
            return self.rate * progress / self.warmup
        along = min(1.0, (progress - self.warmup) / (1 - self.warmup))
        return self.rate * (self.final + (1 - self.final) * 0.5 * (1 + float(np.cos(np.pi * along))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetFeatures:
    """What the target gives for each place: captures joined low to high, and the last state after the final norm."""

    captured: Float[Array, "b t n"]
    last: Float[Array, "b t d"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """What training reads and never changes: the target's embedding and output matrix, and the draft's vocabulary."""

    embedding: Float[Array, "v d"]
    head: Float[Array, "v d"]
    target_ids: Int[Array, " w"]

    def parameters(self, config: DraftConfig) -> dict[str, Float[Array, "..."]]:
        """The draft's frozen parameters: the embedding, and the target's rows where its head is borrowed."""
        rows = {} if config.own_head else {HEAD: self.head[self.target_ids]}
        return {EMBEDDING: self.embedding, **rows}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Master weights in float32 by parameter path, and the optimiser's moments."""

    weights: dict[str, Float[Array, "..."]]
    moments: Any
    step: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Figures:
    """One step's losses and accuracies per unrolled step, and the gradient's norm before clipping."""

    loss: Float[Array, ""]
    losses: Float[Array, " steps"]
    accuracies: Float[Array, " steps"]
    gradient_norm: Float[Array, ""]


def target_head(target: Target) -> Float[Array, "v d"]:
    """The output matrix, which is the embedding where the two are tied."""
    return target.embedding.weight[...] if target.head is None else target.head.weight[...]


def target_features(target: Target, text: Text, boundaries: tuple[int, ...]) -> TargetFeatures:
    """One pass of the target over packed rows; documents do not see each other."""
    return TargetFeatures(*_compiled_pass(target, text.tokens, text.positions, text.segments, boundaries))


def packed_pass(
    target: Target,
    tokens: Int[Array, "b t"] | Int[np.ndarray, "b t"],
    positions: Int[Array, "b t"] | Int[np.ndarray, "b t"],
    segments: Int[Array, "b t"] | Int[np.ndarray, "b t"],
    boundaries: tuple[int, ...],
) -> tuple[Float[Array, "b t n"], Float[Array, "b t d"]]:
    """`TargetFeatures` of rows of a `Text`; not compiled, for a program that holds it."""
    batch, positions = tokens.shape[0], jnp.asarray(positions)
    step = Step(positions, causal_within(segments), positions, jnp.zeros((batch,), jnp.int32))
    out = target(jnp.asarray(tokens), step, target.empty_caches(batch, 0), boundaries)
    return jnp.concatenate(out.captured, axis=-1), target.norm(out.hidden)


_compiled_pass = nnx.jit(packed_pass, static_argnames="boundaries")


def _matrices(tree: Any) -> Any:
    """Which axes of a parameter make a matrix: the last two; one before them numbers matrices side by side."""
    axes = lambda x: optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2) if x.ndim > 1 else None
    return jax.tree.map(axes, tree)


def _direction(settings: TrainSettings) -> optax.GradientTransformation:
    b1, b2 = settings.betas
    if settings.optimiser == "adamw":
        return optax.scale_by_adam(b1=b1, b2=b2)
    if settings.optimiser != "muon":
        raise ConfigError("unknown", where="optimiser", found=settings.optimiser, expected=" or ".join(OPTIMISERS))
    muon = optax.contrib.muon(1.0, consistent_rms=0.2, adam_b1=b1, adam_b2=b2, muon_weight_dimension_numbers=_matrices)
    return optax.chain(muon, optax.scale(-1.0))  # the rate, and the sign of a descent, are applied by the step


def _optimiser(settings: TrainSettings) -> optax.GradientTransformation | optax.MultiSteps:
    every_step = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        _direction(settings),
        optax.add_decayed_weights(settings.weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )
    return every_step if settings.accumulate == 1 else optax.MultiSteps(every_step, settings.accumulate)


def start(
    weights: Mapping[str, Shaped[np.ndarray, "..."] | Shaped[Array, "..."]], settings: TrainSettings
) -> TrainState:
    """A fresh state from first weights."""
    master = {path: jnp.asarray(value, jnp.float32) for path, value in weights.items()}
    with jax.numpy_dtype_promotion("standard"):
        moments = _optimiser(settings).init(master)
    return TrainState(master, moments, jnp.zeros((), jnp.int32))


@partial(jax.jit, static_argnames=("config", "settings", "over"), donate_argnames="state")
def train_step(
    state: TrainState,
    frozen: Frozen,
    text: Text,
    features: TargetFeatures,
    rate: Float[Array, ""],
    *,
    config: DraftConfig,
    settings: TrainSettings,
    over: tuple[str, ...] = (),
) -> tuple[TrainState, Figures]:
    """One batch: an optimiser step, or with `accumulate` a part of one. `state.step` counts batches.

    `rate` is an argument, so that a schedule compiles nothing new.

    Arguments:
        over: mesh axes, in a program that every device runs on rows of its own, equally many: gradients and losses are then
            averaged over them, counts summed, and every device takes the same step.
    """
    dtype = jnp.dtype(settings.compute_dtype)
    teacher = teach(features.last, frozen.head, frozen.target_ids)

    def objective(weights):
        if settings.int8:
            weights = as_exported(weights)
        draft = rebuild(config, weights, frozen.parameters(config), frozen.target_ids, dtype)
        out = ttt(draft, text, features.captured, teacher, settings.unroll, settings.objective)
        decays = jnp.float32(settings.decay) ** jnp.arange(settings.unroll, dtype=jnp.float32)
        return jnp.sum(decays * out.losses), out

    (loss, out), gradient = jax.value_and_grad(objective, has_aux=True)(state.weights)
    losses, correct, places = out.losses, out.correct, out.places
    if over:
        # devices that took the same rows meet too: whatever a device rounds in its own way, the weights stay the same on all
        loss, losses, gradient = lax.pmean((loss, losses, gradient), over)
        correct, places = lax.psum((correct, places), over)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to its int32 step count
        updates, moments = _optimiser(settings).update(gradient, state.moments, state.weights)
    weights = jax.tree.map(lambda w, u: w - rate * u, state.weights, updates)
    figures = Figures(loss, losses, correct / jnp.maximum(places, 1), optax.tree.norm(gradient))
    return TrainState(weights, moments, state.step + 1), figures


@partial(jax.jit, static_argnames=("config", "settings"))
def drafted_tokens(
    weights: dict[str, Float[Array, "..."]],
    frozen: Frozen,
    text: Text,
    features: TargetFeatures,
    *,
    config: DraftConfig,
    settings: TrainSettings,
) -> Int[Array, "steps b t"]:
    """The chain that the draft would propose at every place, target ids; of no meaning behind a wrong token."""
    dtype = jnp.dtype(settings.compute_dtype)
    teacher = teach(features.last, frozen.head, frozen.target_ids)
    if settings.int8:
        weights = as_exported(weights)
    draft = rebuild(config, weights, frozen.parameters(config), frozen.target_ids, dtype)
    return ttt(draft, text, features.captured, teacher, settings.unroll).drafted


def chain_acceptance(
    text: Text, drafted: Int[np.ndarray, "steps b t"], steps: int
) -> tuple[Float[np.ndarray, " docs"], Int[np.ndarray, " docs"]]:
    """Tau of the chain of `steps` on each document's answer, were it decoded greedily, and the cycles it took.

    Up to the first rejection the drafted tokens are the true ones, so teacher-forced rows give the very chain that
    drafting gives. A cycle is counted only where the text goes on for the whole chain and the bonus token, so an end
    does not cut it.
    """
    taus, cycles = [], []
    tokens, segments, loss = (np.asarray(x) for x in (text.tokens, text.segments, text.loss))
    for row in range(tokens.shape[0]):
        for segment in range(segments[row].max() + 1):
            places = np.flatnonzero(segments[row] == segment)
            first, end = places[0], places[-1] + 1
            answer = np.flatnonzero(loss[row, first:end])
            if not answer.size:
                continue
            root, accepted, count = first + answer[0] + 1, 0, 0  # the answer's first token comes from the prefill
            while root + steps + 1 < end:
                right = 0
                while right < steps and drafted[right, row, root - 1] == tokens[row, root + 1 + right]:
                    right += 1
                accepted, count, root = accepted + right, count + 1, root + right + 1
            if count:
                taus.append(accepted / count + 1)
                cycles.append(count)
    return np.asarray(taus), np.asarray(cycles, np.int64)
