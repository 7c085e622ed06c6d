"""One training step's losses and gradients by checkpoint tensor names, for comparison with other trainers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from eaglejax.drafting import StandaloneDraft
from eaglejax.errors import ConfigError
from eaglejax.models.config import DraftConfig, GQAConfig
from eaglejax.training.ttt import Text, teach, ttt
from eaglejax.training.weights import checkpoint_names, frozen_weights, rebuild, trained_weights

DECAY = 0.8  # weight of step j is DECAY ** j


@dataclass(frozen=True)
class LossAndGrads:
    """loss: sum of 0.8^j x step_losses[j]. grads: of `loss`, by checkpoint tensor name; the
    embedding is frozen, and so is a head that the draft borrows."""

    loss: float
    step_losses: Float[np.ndarray, " steps"]
    step_accuracies: Float[np.ndarray, " steps"]
    grads: dict[str, Float[np.ndarray, "..."]]


def ttt_loss_and_grads(
    draft: StandaloneDraft,
    *,
    input_ids: Shaped[np.ndarray, "b t"] | Shaped[Array, "b t"],
    loss_mask: Shaped[np.ndarray, "b t"] | Shaped[Array, "b t"],
    aux_hidden: Float[np.ndarray, "b t n"] | Float[Array, "b t n"],
    target_last_hidden: Float[np.ndarray, "b t d"] | Float[Array, "b t d"],
    target_head: Float[np.ndarray, "v d"] | Float[Array, "v d"],
    steps: int,
) -> LossAndGrads:
    """Losses of `steps` unrolled steps and their gradients.

    Arguments:
        draft: from `eaglejax.load_draft`. Computed in its dtype.
        input_ids, loss_mask: as stored by a trainer, not shifted.
        aux_hidden: captured target states joined low to high, n = captures x target width.
        target_last_hidden: after the target's last norm. target_head: the target's output matrix.

    A step's loss is divided by all b * t places, its accuracy by the places whose loss mask is on.

    Raises ConfigError for a draft of another attention than grouped-query, and for shapes that do not fit.
    """
    module = draft.draft
    config, dtype = module.config, module.dtype
    check_trainable(config)
    _check_shapes(config, input_ids, loss_mask, aux_hidden, target_last_hidden, target_head, steps)
    batch, size = input_ids.shape
    text = Text(
        tokens=jnp.asarray(np.asarray(input_ids, np.int32)),
        positions=jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size)),
        segments=jnp.zeros((batch, size), jnp.int32),
        loss=jnp.asarray(np.asarray(loss_mask).astype(bool)),
    )

    @jax.jit
    def run(weights, frozen, target_ids, features, last, head):
        def loss(weights):
            out = ttt(rebuild(config, weights, frozen, target_ids, dtype), text, features, teacher, steps)
            return jnp.sum(jnp.float32(DECAY) ** jnp.arange(steps, dtype=jnp.float32) * out.losses), out

        teacher = teach(last, head, target_ids)
        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return value, out.losses, out.correct / jnp.maximum(out.places, 1), grads

    features, last, head = (
        jnp.asarray(np.asarray(x)).astype(dtype) for x in (aux_hidden, target_last_hidden, target_head)
    )
    value, losses, accuracies, grads = run(
        trained_weights(module), frozen_weights(module), module.target_ids[...], features, last, head
    )
    return LossAndGrads(float(value), np.asarray(losses), np.asarray(accuracies), checkpoint_names(config, grads))


def check_trainable(config: DraftConfig) -> None:
    """Refuse drafts whose attention the unroll does not know."""
    for index, layer in enumerate(config.layers):
        attention = layer.attention
        if not isinstance(attention, GQAConfig) or attention.sinks:
            raise ConfigError(
                "this draft cannot be trained here",
                where=f"layer {index}",
                found="attention sinks" if isinstance(attention, GQAConfig) else "latent attention",
                expected="plain grouped-query attention",
            )


def _check_shapes(config: DraftConfig, input_ids, loss_mask, aux_hidden, last, head, steps: int) -> None:
    places = tuple(np.shape(input_ids))
    wide = config.captures * config.target_hidden_size
    facts = [
        ("loss_mask", tuple(np.shape(loss_mask)), places),
        ("aux_hidden", tuple(np.shape(aux_hidden)), (*places, wide)),
        ("target_last_hidden", tuple(np.shape(last))[:2], places),
        ("target_head", tuple(np.shape(head)), (config.vocab_size, np.shape(last)[-1])),
    ]
    for where, found, expected in facts:
        if found != expected:
            raise ConfigError("this array does not fit the others", where=where, found=found, expected=expected)
    if steps < 1:
        raise ConfigError("at least one step is unrolled", where="steps", found=steps, expected="1 or more")
