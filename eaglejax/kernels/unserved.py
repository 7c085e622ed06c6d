"""What of a model our kernels do not serve, for the load report: those parts run through XLA."""

from __future__ import annotations

import jax.numpy as jnp

from eaglejax.kernels.experts_gpu_shape import packed_serves, serves
from eaglejax.kernels.row_kernels import norm_rotate_serves
from eaglejax.kernels.select import attention_kernel, chosen_kernels, no_pallas
from eaglejax.models.config import GQAConfig, LayerConfig, MLAConfig, MoEConfig
from eaglejax.models.packed import PackedWeight
from eaglejax.models.target import Target


def unserved(target: Target, max_len: int) -> list[str]:
    """One line per part and reason; none where no kernel of ours runs at all, which `select.describe` tells.

    Arguments:
        max_len: positions of the caches.
    """
    dtype, found = jnp.dtype(target.dtype), {}
    if attention_kernel() == "portable":
        return _portable(target, dtype)
    if no_pallas() is not None:
        return []
    if dtype != jnp.bfloat16:
        return [f"no kernel of ours: they compute in bfloat16, not {dtype.name}"]
    if max_len % 8:
        found[f"tree attention by XLA: caches of {max_len} rows are not whole eights (max_len)"] = None
    for layer, block in zip(target.config.layers, target.layers, strict=True):
        for line in (*_attention(layer), *_experts(layer, target.config.hidden_size, block)):
            found[line] = None
    return list(found)


def _attention(layer: LayerConfig) -> list[str]:
    attention, lines, widths = layer.attention, [], _widths(layer)
    if any(width % 64 for width in widths):
        lines.append(f"tree attention by XLA: head sizes {widths[0]} and {widths[1]} are not multiples of 64")
    if isinstance(attention, GQAConfig) and (reason := norm_rotate_serves(1, attention, [jnp.bfloat16])):
        lines.append(f"rotation by XLA: {reason}")
    return lines


def _widths(layer: LayerConfig) -> tuple[int, int]:
    """Of the keys and values that attention sees."""
    attention = layer.attention
    if isinstance(attention, MLAConfig):
        return attention.kv_lora_rank + attention.rope_dim, attention.kv_lora_rank
    return attention.head_dim, attention.head_dim


def _portable(target: Target, dtype: jnp.dtype) -> list[str]:
    """The same for other GPUs than Hopper's, where the only kernel is tree attention's."""
    # Pallas takes a while to import
    from eaglejax.kernels.tree_attention_portable import DTYPES, serves_widths

    if dtype not in DTYPES:
        return [f"tree attention by XLA: our kernel computes in bfloat16 and float32, not {dtype.name}"]
    latent = lambda layer: isinstance(layer.attention, MLAConfig)
    reasons = (serves_widths(*_widths(layer), latent(layer), dtype.itemsize) for layer in target.config.layers)
    return [f"tree attention by XLA: {reason}" for reason in dict.fromkeys(reasons) if reason is not None]


def _experts(layer: LayerConfig, features: int, block) -> list[str]:
    mixture = layer.mlp
    if not isinstance(mixture, MoEConfig):
        return []
    down = block.mlp.experts.down
    count, d, width = down.shape
    reason = serves(1, count, d, width, [jnp.bfloat16], mixture.expert_activation)
    if reason is None and isinstance(down, PackedWeight):
        packing = down.packing
        if chosen_kernels() == "pallas":
            grids = packing.grid(width, d), packing.grid(d, width)
            reason = packed_serves(packing.kind, grids, packing.scale, d, width)
        else:
            reason = f"their weights are packed ({packing.kind})"
    return [f"experts by XLA: {reason}"] if reason else []
