"""The loss over the draft vocabulary, a few rows at a time: logits of all rows never exist together.

The loss is one number, so its gradient in the hidden states is known as soon as the logits are: it is made in the
forward pass, chunk by chunk, and the backward pass only scales it. Logits are computed once and never kept.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eaglejax.training.products import wide_einsum

CHUNK = 1 << 24  # logits that exist at a time
Objective = Literal["entropy", "acceptance"]
OBJECTIVES: tuple[Objective, ...] = ("entropy", "acceptance")


def vocabulary_loss(
    hidden: Float[Array, "n d"],
    head: Float[Array, "w d"],
    soft: Float[Array, "m w"],
    rows: Int[Array, " n"],
    counted: Bool[Array, " n"],
    *,
    objective: Objective = "entropy",
    learn_head: bool = True,
) -> tuple[Float[Array, ""], Int[Array, " n"]]:
    """The loss summed over the rows that count, and every row's first choice.

    Arguments:
        hidden: after the draft's final norm. soft: the teacher's probabilities; nothing is differentiated in them.
        rows: which row of `soft` is each one's teacher; below 0 a uniform one.
        objective: "entropy", -sum p log q, EAGLE's; or "acceptance", -log sum min(p, q), the log of the chance that a
            token drawn from q is kept when p decides.
        learn_head: False where the head is the target's: its gradient is then not computed.
    """
    return _loss(objective, learn_head, hidden, head, soft, rows, counted)


def row_losses(objective: Objective, logits: Float[Array, "n w"], soft: Float[Array, "n w"]) -> Float[Array, " n"]:
    """Each row's loss from its whole logits, float32."""
    soft, log_q = soft.astype(jnp.float32), jax.nn.log_softmax(logits, axis=-1)
    if objective == "acceptance":
        return -jnp.log(jnp.sum(jnp.minimum(soft, jnp.exp(log_q)), axis=-1) + 1e-20)
    return -jnp.sum(soft * log_q, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(objective, learn_head, hidden, head, soft, rows, counted):
    loss, choices, _ = _chunks(objective, (), hidden, head, soft, rows, counted)
    return loss, choices


def _forward(objective, learn_head, hidden, head, soft, rows, counted):
    loss, choices, gradients = _chunks(objective, (0, 1) if learn_head else (0,), hidden, head, soft, rows, counted)
    return (loss, choices), gradients


def _backward(objective, learn_head, gradients, cotangents):
    scaled = [(cotangents[0] * gradient.astype(jnp.float32)).astype(gradient.dtype) for gradient in gradients]
    return scaled[0], scaled[1] if learn_head else None, None, None, None


_loss.defvjp(_forward, _backward)


def _chunks(objective, wanted: tuple[int, ...], hidden, head, soft, rows, counted):
    """Loss, choices, and the gradients in the `wanted` of (hidden, head)."""
    count, width = hidden.shape[0], head.shape[0]
    parts = -(-count // max(1, CHUNK // width))
    size = -(-count // parts)
    cut = lambda x: jnp.pad(x, [(0, parts * size - count), *[(0, 0)] * (x.ndim - 1)]).reshape(parts, size, *x.shape[1:])

    def one(hidden, head, rows, counted):
        logits = wide_einsum("nd,wd->nw", hidden, head)
        teacher = jnp.where(rows[:, None] < 0, jnp.asarray(1 / width, soft.dtype), soft[jnp.maximum(rows, 0)])
        return jnp.sum(jnp.where(counted, row_losses(objective, logits, teacher), 0)), jnp.argmax(logits, axis=-1)

    def body(carry, part):
        total, for_head = carry
        if not wanted:
            loss, choices = one(part[0], head, *part[1:])
            return (total + loss, for_head), (choices, None)
        (loss, choices), gradients = jax.value_and_grad(one, argnums=wanted, has_aux=True)(part[0], head, *part[1:])
        if for_head is not None:
            for_head = for_head + gradients[1].astype(jnp.float32)
        return (total + loss, for_head), (choices, gradients[0])

    start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32) if 1 in wanted else None)
    (loss, for_head), (choices, for_hidden) = lax.scan(body, start, (cut(hidden), cut(rows), cut(counted)))
    gradients = []
    if for_hidden is not None:
        gradients.append(for_hidden.reshape(parts * size, -1)[:count])
    if for_head is not None:
        gradients.append(for_head.astype(head.dtype))
    return loss, choices.reshape(-1)[:count].astype(jnp.int32), gradients
