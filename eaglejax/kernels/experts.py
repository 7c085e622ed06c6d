"""Feed-forward of routed experts: two exact ways to the same sum in jnp, and the kernels for a GPU where they serve.

Few (row, expert) pairs: the weights of each pair are gathered and multiplied in one batched product. Many: a loop
over the experts that skips those no row chose. Both add the contributions of a row in ascending order of expert, in
float32, so that what a row gets does not depend on the rows beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eaglejax.kernels.experts_gpu_shape import Parts, packed_serves, route_serves, serves
from eaglejax.kernels.select import chosen_kernels, no_pallas, platform
from eaglejax.models.config import MoEConfig
from eaglejax.models.layers import project
from eaglejax.models.packed import PackedWeight

PRECISION = lax.Precision.HIGHEST
GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0


def experts(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    gate_up: Float[Array, "e 2 f d"] | PackedWeight,
    down: Float[Array, "e d f"] | PackedWeight,
    gate_up_bias: Float[Array, "e 2 f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    activation: str = "silu",
    gather: bool | None = None,
) -> Float[Array, "n d"] | Parts:
    """Sum over the k experts of each row of weight * expert(row).

    Arguments:
        x: rows; a row contributes to its own result only, whatever it holds (inf and NaN included).
        ids: experts of each row, ascending; an id of e or above stands for "none".
        weights: float32.
        gate_up, down: weights of all experts, gate before up; packed ones are widened expert by expert, as chosen.
        activation: "silu", or "gpt_oss" (gate and up clamped, gate * sigmoid(1.702 gate) * (up + 1)).
        gather: forces one of the two ways in jnp; by default `select.no_pallas` and `serves`, then `gather_pays`, choose.

    Returns: [n, d] in the dtype of x, accumulated in float32; where kernels serve, its parts (`summed` adds them): whoever adds them to
        something can sum them in the same pass.
    """
    with jax.named_scope("experts"):
        if gather is None and kernels_serve(x, gate_up, down, activation):
            from eaglejax.kernels.experts_gpu import experts_gpu  # Pallas takes a while to import

            return experts_gpu(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation=activation)
        if gather is None and isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
            if packed_kernels_serve(x, gate_up, down, activation):
                from eaglejax.kernels.packed_experts_gpu import packed_experts_gpu

                return packed_experts_gpu(
                    x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation=activation
                )
        if gather is None:
            gather = gather_pays(ids.size, gate_up.shape[0])
        way = _gathered if gather else _looped
        return way(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation).astype(x.dtype)


def kernels_serve(
    x: Float[Array, "n d"],
    gate_up: Float[Array, "e 2 f d"] | PackedWeight,
    down: Float[Array, "e d f"] | PackedWeight,
    activation: str,
) -> bool:
    """Whether the program being traced gives these rows to the Mosaic kernels."""
    if no_pallas() is not None or isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight):
        return False
    dtypes = (x.dtype, gate_up.dtype, down.dtype)
    count, d, f = down.shape
    return serves(x.shape[0], count, d, f, dtypes, activation) is None


def packed_kernels_serve(x: Float[Array, "n d"], gate_up: PackedWeight, down: PackedWeight, activation: str) -> bool:
    """Whether the program being traced gives these rows to the Mosaic kernels for packed weights.

    Only where Pallas was asked for by name: they have not been measured on a card.
    """
    if no_pallas() is not None or chosen_kernels() != "pallas" or gate_up.packing != down.packing:
        return False
    count, d, f = down.shape
    if serves(x.shape[0], count, d, f, (x.dtype, gate_up.dtype, down.dtype), activation) is not None:
        return False
    packing = down.packing
    return packed_serves(packing.kind, (packing.grid(f, d), packing.grid(d, f)), packing.scale, d, f) is None


def routed_experts(
    x: Float[Array, "n d"],
    router: Float[Array, "e d"],
    router_bias: Float[Array, " e"] | None,
    correction: Float[Array, " e"] | None,
    gate_up: Float[Array, "e 2 f d"] | PackedWeight,
    down: Float[Array, "e d f"] | PackedWeight,
    gate_up_bias: Float[Array, "e 2 f"] | None = None,
    down_bias: Float[Array, "e d"] | None = None,
    *,
    config: MoEConfig,
) -> Parts | None:
    """Router and `experts` in Mosaic kernels alone, all experts being on this device; None where they do not serve both."""
    if not kernels_serve(x, gate_up, down, config.expert_activation):
        return None
    if route_serves(x.shape[0], config.experts, x.shape[1], x.dtype) is not None:
        return None
    from eaglejax.kernels.experts_gpu import experts_of_tables  # Pallas takes a while to import
    from eaglejax.kernels.route_gpu import route_gpu

    with jax.named_scope("route"):
        tables = route_gpu(x, router, router_bias, correction, config=config, with_ids=down_bias is not None)
    with jax.named_scope("experts"):
        return experts_of_tables(
            x,
            tables,
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            topk=config.topk,
            activation=config.expert_activation,
        )


def gather_pays(pairs: int, count: int, device: str | None = None) -> bool:
    """Whether the weights of every pair are gathered.

    Arguments:
        pairs: (row, expert) pairs of one pass, those of other devices included.
        count: experts of this device.
        device: its platform, by default that of the program being traced; a plan asks for another.

    On a CPU the loop is faster at every size from one row on (measured: 8 to 128 experts, 1 to 64 rows, widths 64 to
    1024). On an accelerator a skip costs a round trip to the host, so the loop visits every expert there and pays
    once most of them are touched.
    """
    return (device or platform()) != "cpu" and pairs <= count // 2


def _product(pattern: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(pattern, x, weight, precision=PRECISION, preferred_element_type=jnp.float32)


def _gated(activation: str, both: Float[Array, "*lead 2 f"]) -> Float[Array, "*lead f"]:
    gate, up = both[..., 0, :], both[..., 1, :]
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gpt_oss":
            gate = jnp.minimum(gate, GPT_OSS_LIMIT)
            up = jnp.clip(up, -GPT_OSS_LIMIT, GPT_OSS_LIMIT)
            return gate * jax.nn.sigmoid(gate * GPT_OSS_ALPHA) * (up + 1)
    raise AssertionError(f"expert activation {activation!r} was not checked at config time")


def _gathered(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation) -> Float[Array, "n d"]:
    count = gate_up.shape[0]
    take = lambda table: (
        table.take(ids) if isinstance(table, PackedWeight) else jnp.take(table, ids, axis=0, mode="clip")
    )
    both = _product("nd,nkgfd->nkgf", x, take(gate_up))
    if gate_up_bias is not None:
        both = both + take(gate_up_bias).astype(jnp.float32)
    y = _product("nkf,nkdf->nkd", _gated(activation, both).astype(x.dtype), take(down))
    if down_bias is not None:
        y = y + take(down_bias).astype(jnp.float32)
    y = jnp.where((ids < count)[..., None], y * weights[..., None], 0)
    total = y[:, 0]
    for place in range(1, ids.shape[1]):
        total = total + y[:, place]
    return total


def _looped(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation) -> Float[Array, "n d"]:
    skip = platform() == "cpu"

    def visit(expert: Array, total: Array) -> Array:
        chosen = ids == expert

        def add(total: Array) -> Array:
            both = project(x, gate_up[expert], jnp.float32)
            if gate_up_bias is not None:
                both = both + gate_up_bias[expert].astype(jnp.float32)
            y = project(_gated(activation, both).astype(x.dtype), down[expert], jnp.float32)
            if down_bias is not None:
                y = y + down_bias[expert].astype(jnp.float32)
            weight = jnp.where(chosen, weights, 0).sum(axis=1, keepdims=True)
            return jnp.where(chosen.any(axis=1, keepdims=True), total + weight * y, total)

        return lax.cond(chosen.any(), add, lambda total: total, total) if skip else add(total)

    return lax.fori_loop(0, gate_up.shape[0], visit, jnp.zeros(x.shape, jnp.float32))
