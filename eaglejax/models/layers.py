"""The small parts every model shares: parameters, projections, norms, the gated MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from eaglejax.models.config import DenseConfig
from eaglejax.models.split import WHOLE, Over, local_dense

# float32 means float32 on every device: without it a GPU multiplies in TF32. Harmless for bfloat16 operands.
PRECISION = lax.Precision.HIGHEST


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike, over: Over = WHOLE) -> nnx.Param:
    """An unset parameter (zeros; abstract under `nnx.eval_shape`) of one device's shape, with the logical name of each axis.

    Its metadata `mesh_axes` and `repeats` say how the parts of all devices make the whole (`sharding/layout.py`).
    """
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, mesh_axes=over.mesh_axes(axes), repeats=over.repeats(axes))


def project(
    x: Shaped[Array, "*lead d"],
    weight: Shaped[Array, "*out d"],
    accumulate: DTypeLike | None = None,
) -> Shaped[Array, "*lead_out"]:
    """x times weight transposed over the last axis of both; weights lie as in released checkpoints, [out, in].

    `accumulate` is the dtype of the result where it must be wider than x (float32 for heads and routers).
    """
    # weight first: with x first XLA transposes a weight of more than two axes on every call (8 times slower for few rows on a CPU)
    contract = (((weight.ndim - 1,), (x.ndim - 1,)), ((), ()))
    y = lax.dot_general(weight, x, contract, precision=PRECISION, preferred_element_type=accumulate)
    out = weight.ndim - 1
    return lax.transpose(y, (*range(out, y.ndim), *range(out)))


class Linear(nnx.Module):
    """A projection with weight [*out, in] and optional bias [*out].

    Where the input is split over a mesh axis, `summed` says so: the products are summed over the devices before the bias is added.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        axes: tuple[str | None, ...],
        dtype: DTypeLike,
        use_bias: bool = False,
        over: Over = WHOLE,
        summed: Over = WHOLE,
    ):
        out = out_features if isinstance(out_features, tuple) else (out_features,)
        self.summed = summed
        self.weight = param((*out, in_features), axes, dtype, over)
        self.bias = param(out, axes[:-1], dtype, over) if use_bias else None

    def __call__(self, x: Shaped[Array, "*lead i"]) -> Shaped[Array, "*lead_out"]:
        y = self.summed.sum(project(x, self.weight[...]))
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Llama's form: weight, no +1)."""

    def __init__(self, features: int, eps: float, *, dtype: DTypeLike, axes=("d",)):
        self.scale = param((features,), axes, dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
        return rms_norm(x, self.scale[...], self.eps)


def rms_norm(x: Float[Array, "*lead n"], scale: Float[Array, " n"], eps: float) -> Float[Array, "*lead n"]:
    """What an `RMSNorm` with this scale makes of x."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scale * wide.astype(x.dtype)


class Embedding(nnx.Module):
    """Token table [v, d]. Ids are never out of range here: prompts are checked before any compile."""

    def __init__(self, vocab_size: int, features: int, *, dtype: DTypeLike, over: Over = WHOLE):
        self.over = over
        self.weight = param((over.part(vocab_size), features), ("v", "d"), dtype, over)

    def __call__(self, tokens: Int[Array, "*lead"]) -> Float[Array, "*lead d"]:
        table = self.weight[...]
        if self.over.axis is None:
            return jnp.take(table, tokens, axis=0, mode="clip")
        # exactly one device holds the row of a token: the others add zeros, which changes no bit
        places = tokens - self.over.first(table.shape[0])
        here = (places >= 0) & (places < table.shape[0])
        rows = jnp.take(table, places, axis=0, mode="clip")
        return self.over.sum(jnp.where(here[..., None], rows, 0))


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)); gate and up lie in one array [2, f, d] so that they are read in one product."""

    def __init__(
        self, config: DenseConfig, features: int, *, dtype: DTypeLike, over: Over = WHOLE, summed: Over | None = None
    ):
        """`summed`: over what the result is summed here, by default `over`; WHOLE leaves that to the caller."""
        config = local_dense(config, over)
        bias, summed = config.bias, over if summed is None else summed
        self.gate_up = Linear(features, (2, config.width), axes=(None, "f", "d"), dtype=dtype, use_bias=bias, over=over)
        self.down = Linear(
            config.width, features, axes=("d", "f"), dtype=dtype, use_bias=bias, over=over, summed=summed
        )
        self.activation = config.activation

    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        with jax.named_scope("mlp"):
            both = self.gate_up(x)
            return self.down(activate(self.activation, both[..., 0, :]) * both[..., 1, :])


def activate(name: str, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The activation of a gated MLP by its name in a config (`hidden_act`)."""
    match name:
        case "silu" | "swish":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_pytorch_tanh" | "gelu_new":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)
    raise AssertionError(f"activation {name!r} was not checked at config time")


ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")


def leaves(module: nnx.Module) -> dict[str, Any]:
    """Parameters of a module by dotted path, e.g. "layers.0.attention.q.weight"."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(str(part) for part in path): value for path, value in flat}
