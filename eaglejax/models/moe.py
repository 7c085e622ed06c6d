"""Mixture of experts: the router arithmetic of each family and the block around the experts kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from eaglejax.kernels.experts import experts, routed_experts
from eaglejax.kernels.experts_gpu_shape import Parts, summed
from eaglejax.models.config import DenseConfig, MoEConfig
from eaglejax.models.layers import MLP, param, project
from eaglejax.models.packed import PackedWeight
from eaglejax.models.split import WHOLE, Over, local_experts


def route(
    logits: Float[Array, "n e"], config: MoEConfig, correction: Float[Array, " e"] | None = None
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The experts of each row in ascending order, and the weight each is applied with; all in float32.

    Arguments:
        logits: router logits, any bias already added.
        correction: added to the scores for choosing only (DeepSeek-V3, arXiv:2412.19437 section 2.1.2).

    Equal scores go to the lower id. Every row gets exactly `topk` experts: nothing is dropped for capacity.
    """
    with jax.named_scope("route"):
        logits = logits.astype(jnp.float32)
        match config.score:
            case "softmax":
                scores = jax.nn.softmax(logits, axis=-1)
            case "sigmoid":
                scores = jax.nn.sigmoid(logits)
            case "softmax_topk":
                scores = logits
        choice = scores if correction is None else scores + correction
        if config.groups > 1:
            choice = _best_groups(choice, config)
        _watch(choice, config.topk)
        _, ids = lax.top_k(choice, config.topk)
        ids = _ascending(ids)
        if (watched := _WATCHED.get()) is not None:
            watched.experts.append(ids)
        weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
        if config.score == "softmax_topk":
            weights = jax.nn.softmax(weights, axis=-1)
        elif config.normalise:
            total = weights.sum(axis=-1, keepdims=True)
            # sigmoid scores may all underflow; the families that use them add this, the others do not
            weights = weights / (total + 1e-20 if config.score == "sigmoid" else total)
        return ids, weights * config.scaling


@dataclass
class Watched:
    """What routers did, in the order of the layers.

    margins: of every choice, of groups and of experts, how far each row's last chosen score is above the first one left out.
    experts: those of each row.
    """

    margins: list[Float[Array, " n"]] = field(default_factory=list)
    experts: list[Int[Array, "n k"]] = field(default_factory=list)


_WATCHED: ContextVar[Watched | None] = ContextVar("watched", default=None)


def watched() -> Watched | None:
    """What is watched now."""
    return _WATCHED.get()


@contextmanager
def watching_routers() -> Iterator[Watched]:
    """Watches the routers of a model that is traced inside."""
    watched = Watched()
    token = _WATCHED.set(watched)
    try:
        yield watched
    finally:
        _WATCHED.reset(token)


def _watch(scores: Float[Array, "n m"], kept: int) -> None:
    if (watched := _WATCHED.get()) is not None and kept < scores.shape[-1]:
        best, _ = lax.top_k(scores, kept + 1)
        watched.margins.append(best[:, -2] - best[:, -1])


def _best_groups(choice: Float[Array, "n e"], config: MoEConfig) -> Float[Array, "n e"]:
    """Scores of experts outside the best groups become -inf (not 0: a corrected score may be negative)."""
    grouped = choice.reshape(choice.shape[0], config.groups, -1)
    best_two, _ = lax.top_k(grouped, 2)
    totals = best_two.sum(axis=-1)
    _watch(totals, config.topk_groups)
    _, kept = lax.top_k(totals, config.topk_groups)
    keep = (kept[:, :, None] == jnp.arange(config.groups, dtype=kept.dtype)).any(axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _ascending(ids: Int[Array, "n k"]) -> Int[Array, "n k"]:
    """Sorts the few ids of each row by counting: a sort is a kernel of its own on an accelerator, this is not."""
    place = (ids[:, None, :] < ids[:, :, None]).sum(axis=-1, dtype=ids.dtype)
    slots = jnp.arange(ids.shape[1], dtype=ids.dtype)
    return jnp.where(place[:, :, None] == slots, ids[:, :, None], 0).sum(axis=1, dtype=ids.dtype)


class Router(nnx.Module):
    """Router weight [e, d], bias and correction bias [e]; kept and computed in float32 whatever the dtype of the
    model."""

    def __init__(self, config: MoEConfig, features: int):
        self.config = config
        self.weight = param((config.experts, features), ("e", "d"), jnp.float32)
        self.bias = param((config.experts,), ("e",), jnp.float32) if config.router_bias else None
        self.correction = param((config.experts,), ("e",), jnp.float32) if config.correction_bias else None

    def __call__(self, x: Float[Array, "n d"]) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
        weight, bias, correction = self.arrays()
        logits = project(x.astype(jnp.float32), weight)
        if bias is not None:
            logits = logits + bias
        return route(logits, self.config, correction)

    def arrays(self) -> tuple[Array, Array | None, Array | None]:
        """Weight, bias and correction bias."""
        bias = None if self.bias is None else self.bias[...]
        return self.weight[...], bias, None if self.correction is None else self.correction[...]


class Experts(nnx.Module):
    """Weights of the experts: gate_up [e, 2, f, d] (gate first), down [e, d, f], with biases where the family has them.

    Split `over` devices each holds some experts whole (axis "e") or a part of the width of all (axis "f"); what it returns is then a part
    of the sum.
    """

    def __init__(self, config: MoEConfig, features: int, *, dtype: DTypeLike, over: Over = WHOLE):
        self.over = over
        config = local_experts(config, over)
        count, width = config.experts, config.width
        self.activation = config.expert_activation
        self.gate_up = param((count, 2, width, features), ("e", None, "f", "d"), dtype, over)
        self.down = param((count, features, width), ("e", "d", "f"), dtype, over)
        self.gate_up_bias = param((count, 2, width), ("e", None, "f"), dtype, over) if config.expert_bias else None
        self.down_bias = param((count, features), ("e", "d"), dtype, over) if config.expert_bias else None

    def __call__(
        self, x: Float[Array, "n d"], ids: Int[Array, "n k"], weights: Float[Array, "n k"]
    ) -> Float[Array, "n d"] | Parts:
        """Their weighted sum for each row, or its parts where the kernels serve.

        Arguments: ids of all experts, [n, k] ascending; weights float32.
        """
        if "e" in self.over.names:
            ids = self._own(ids)
        return experts(x, ids, weights, *self.arrays(), activation=self.activation)

    def arrays(self) -> tuple[Any, Any, Array | None, Array | None]:
        """This device's weights and biases, in the order in which the kernels take them."""
        return (
            self.gate_up if isinstance(self.gate_up, PackedWeight) else self.gate_up[...],
            self.down if isinstance(self.down, PackedWeight) else self.down[...],
            None if self.gate_up_bias is None else self.gate_up_bias[...],
            None if self.down_bias is None else self._down_bias(),
        )

    def _own(self, ids: Int[Array, "n k"]) -> Int[Array, "n k"]:
        """Numbers among this device's experts; those of other devices become "none"."""
        count = self.down.shape[0]
        places = ids - self.over.first(count)
        return jnp.where((places >= 0) & (places < count), places, count)

    def _down_bias(self) -> Float[Array, "e d"]:
        """With the width split every device adds a part of each expert's result: the bias is added by the first alone."""
        assert self.down_bias is not None
        bias = self.down_bias[...]
        if "f" not in self.over.names:
            return bias
        return jnp.where(self.over.first(1) == 0, bias, 0)


class MoE(nnx.Module):
    """Routed experts plus shared experts, the latter behind a sigmoid gate where the family has one (Qwen2-MoE).

    Every device routes all rows. What it then computes of routed and shared experts is summed first, so that a layer needs one all-reduce.
    """

    def __init__(
        self, config: MoEConfig, features: int, *, dtype: DTypeLike, over: Over = WHOLE, shared_over: Over = WHOLE
    ):
        self.config, self.over, self.shared_over = config, over, shared_over
        self.router = Router(config, features)
        self.experts = Experts(config, features, dtype=dtype, over=over)
        shared = DenseConfig(config.shared_width)
        self.shared = (
            MLP(shared, features, dtype=dtype, over=shared_over, summed=WHOLE) if config.shared_width else None
        )
        self.shared_gate = param((1, features), (None, "d"), dtype) if config.shared_gate else None

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        out = self.unsummed(x)
        with jax.named_scope("moe"):
            return summed(out, x.reshape(-1, x.shape[-1])).reshape(x.shape) if isinstance(out, Parts) else out

    def unsummed(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"] | Parts:
        """The same; in parts where kernels leave them and nothing but the routed experts of this device adds to them."""
        with jax.named_scope("moe"):
            rows = x.reshape(-1, x.shape[-1])
            out = self._routed(rows)
            if isinstance(out, Parts):
                if self.shared is None and self.over.axis is None:
                    return out
                out = summed(out, rows)
            if self.shared is not None:
                shared = self.shared(rows)
                if self.shared_gate is not None:
                    shared = jax.nn.sigmoid(project(rows, self.shared_gate[...])) * shared
                if self.shared_over == WHOLE or self.over.axis is None:  # one of the two is whole already
                    out = self.over.sum(out) + self.shared_over.sum(shared)
                else:
                    out = self.over.sum(out + shared)
            else:
                out = self.over.sum(out)
            return out.reshape(x.shape)

    def _routed(self, rows: Float[Array, "n d"]) -> Float[Array, "n d"] | Parts:
        # the kernels of both keep what is watched to themselves, and know no experts of other devices
        if watched() is None and "e" not in self.over.names:
            out = routed_experts(rows, *self.router.arrays(), *self.experts.arrays(), config=self.config)
            if out is not None:
                return out
        return self.experts(rows, *self.router(rows))
