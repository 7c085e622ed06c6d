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
Objective = Literal["entropy", "acceptance", "reached"]
OBJECTIVES: tuple[Objective, ...] = ("entropy", "acceptance", "reached")


def vocabulary_loss(
    hidden: Float[Array, "n d"],
    head: Float[Array, "w d"],
    soft: Float[Array, "m w"],
    rows: Int[Array, " n"],
    counted: Bool[Array, " n"],
    weights: Float[Array, " n"] | None = None,
    *,
    objective: Objective = "entropy",
    learn_head: bool = True,
) -> tuple[Float[Array, ""], Int[Array, " n"], Float[Array, " n"]]:
    """The loss summed over the rows that count, every row's first choice, and every row's own loss, not differentiable.

    Arguments:
        hidden: after the draft's final norm. soft: the teacher's probabilities; nothing is differentiated in them.
        rows: which row of `soft` is each one's teacher; below 0 a uniform one.
        objective: "entropy", -sum p log q, EAGLE's; or "acceptance", -log sum min(p, q), the log of the chance that a
            token drawn from q is kept when p decides. "reached" is "acceptance" here; what it adds, `ttt` does by `weights`.
        weights: of the rows in the sum; nothing is differentiated in them.
        learn_head: False where the head is the target's: its gradient is then not computed.
    """
    if weights is None:
        weights = jnp.ones(counted.shape, jnp.float32)
    return _loss(objective, learn_head, hidden, head, soft, rows, counted, weights)


def row_losses(objective: Objective, logits: Float[Array, "n w"], soft: Float[Array, "n w"]) -> Float[Array, " n"]:
    """Each row's loss from its whole logits, float32."""
    soft, log_q = soft.astype(jnp.float32), jax.nn.log_softmax(logits, axis=-1)
    if objective != "entropy":
        return -jnp.log(jnp.sum(jnp.minimum(soft, jnp.exp(log_q)), axis=-1) + 1e-20)
    return -jnp.sum(soft * log_q, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(objective, learn_head, *given):
    return _chunks(objective, (), *given)[0]


def _forward(objective, learn_head, *given):
    return _chunks(objective, (0, 1) if learn_head else (0,), *given)


def _backward(objective, learn_head, gradients, cotangents):
    scaled = [(cotangents[0] * gradient.astype(jnp.float32)).astype(gradient.dtype) for gradient in gradients]
    return scaled[0], scaled[1] if learn_head else None, None, None, None, None


_loss.defvjp(_forward, _backward)


def _chunks(objective, wanted: tuple[int, ...], hidden, head, soft, rows, counted, weights):
    """Loss, choices and losses of the rows, and the gradients in the `wanted` of (hidden, head)."""
    count, width = hidden.shape[0], head.shape[0]
    parts = -(-count // max(1, CHUNK // width))
    size = -(-count // parts)
    cut = lambda x: jnp.pad(x, [(0, parts * size - count), *[(0, 0)] * (x.ndim - 1)]).reshape(parts, size, *x.shape[1:])

    def one(hidden, head, rows, counted, weights):
        logits = wide_einsum("nd,wd->nw", hidden, head)
        teacher = jnp.where(rows[:, None] < 0, jnp.asarray(1 / width, soft.dtype), soft[jnp.maximum(rows, 0)])
        each = row_losses(objective, logits, teacher)
        return jnp.sum(jnp.where(counted, weights * each, 0)), (jnp.argmax(logits, axis=-1), each)

    def body(carry, part):
        total, for_head = carry
        if not wanted:
            loss, told = one(part[0], head, *part[1:])
            return (total + loss, for_head), (told, None)
        (loss, told), gradients = jax.value_and_grad(one, argnums=wanted, has_aux=True)(part[0], head, *part[1:])
        if for_head is not None:
            for_head = for_head + gradients[1].astype(jnp.float32)
        return (total + loss, for_head), (told, gradients[0])

    start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32) if 1 in wanted else None)
    given = (cut(hidden), cut(rows), cut(counted), cut(weights))
    (loss, for_head), ((choices, each), for_hidden) = lax.scan(body, start, given)
    gradients = []
    if for_hidden is not None:
        gradients.append(for_hidden.reshape(parts * size, -1)[:count])
    if for_head is not None:
        gradients.append(for_head.astype(head.dtype))
    return (loss, choices.reshape(-1)[:count].astype(jnp.int32), each.reshape(-1)[:count]), gradients
