"""Bytes of the buffers of one device beside its weights: caches, the loop's state, temporaries.

Caches and state are those of `speculation/state.py`, exact. Temporaries are an estimate by the formula below: the largest set of arrays
that has to be live at once, counted as XLA's GPU form of the program keeps them (not the CPU's, which widens operands to float32).
"""

from __future__ import annotations

from dataclasses import dataclass

from eaglejax.config import Auto, Speculation
from eaglejax.kernels.experts import gather_pays
from eaglejax.kernels.select import attention_form, attention_kernel, compiling_for
from eaglejax.kernels.tree_attention_shape import left_bytes
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.speculation.adapt import DIFFICULTIES, OFTEN
from eaglejax.speculation.programs import PREFILL_BUCKETS, pending_rows, stop_width

STOP_IDS = stop_width(0)


@dataclass(frozen=True)
class Sizes:
    """What the buffers of one device depend on. `slots`: those of this device. `itemsize`: bytes of the compute dtype.
    `platform`: of the device, on which the form of some kernels depends."""

    target: TargetConfig
    draft: DraftConfig | None
    spec: Speculation | Auto
    slots: int
    max_len: int
    itemsize: int
    platform: str = "gpu"

    @property
    def captures(self) -> int:
        return self.draft.captures if self.draft is not None and self.spec.num_steps else 0

    @property
    def pending(self) -> int:
        """Draft rows a slot keeps between cycles."""
        return pending_rows(self.spec)


def row_values(attention: GQAConfig | MLAConfig) -> int:
    """Values that one cached position of one layer takes on a device."""
    if isinstance(attention, MLAConfig):
        return attention.kv_lora_rank + attention.rope_dim
    return 2 * attention.kv_heads * attention.head_dim


def cache_bytes(layers: tuple[LayerConfig, ...], slots: int, max_len: int, itemsize: int) -> int:
    """The caches of all layers: every slot holds `max_len` positions."""
    return slots * max_len * itemsize * sum(row_values(layer.attention) for layer in layers)


def state_bytes(sizes: Sizes) -> dict[str, int]:
    """The donated state of the decoding loop, by part; exact."""
    slots, pending = sizes.slots, sizes.pending
    features = sizes.captures * sizes.target.hidden_size
    draft = sizes.draft.layers if sizes.draft is not None and sizes.spec.num_steps else ()
    # seed 8, temperature, top_k, top_p, min_p, prompt_length and limit 4 each, stop ids
    request = slots * (8 + 6 * 4 + 4 * STOP_IDS)
    # length, pending_count, cycles 4 each, done and stopped 1 each; token and acceptance history
    counters = slots * (3 * 4 + 2) + 2 * slots * sizes.max_len * 4
    if isinstance(sizes.spec, Auto):  # log-weights, sorts, time spent, credit, rate, cycles by choice
        counters += slots * 4 * (len(DIFFICULTIES) + len(OFTEN) + 4 + len(sizes.spec.choices))
    return {
        "target cache": cache_bytes(sizes.target.layers, slots, sizes.max_len, sizes.itemsize),
        "draft cache": cache_bytes(draft, slots, sizes.max_len, sizes.itemsize),
        "pending features": slots * pending * (features * sizes.itemsize + 4),
        "tokens and requests": request + counters,
    }


@dataclass(frozen=True)
class Rows:
    """The rows of one program on a device: `run` through all layers, `scored` over the vocabulary, `drafted` over the draft's;
    `per_slot` of them see one another."""

    run: int
    scored: int
    drafted: int
    per_slot: int


def program_rows(sizes: Sizes) -> dict[str, Rows]:
    """The rows of a cycle, and of the largest prefill program."""
    slots, spec = sizes.slots, sizes.spec
    bucket = PREFILL_BUCKETS[-1]
    return {
        "decode": Rows(slots * spec.nodes, slots * spec.nodes, slots * spec.topk, spec.nodes),
        "prefill": Rows(slots * bucket, slots, 0, bucket),
    }


def temporary_bytes(sizes: Sizes, rows: Rows, packed_dense: int) -> dict[str, int]:
    """Arrays of one program that are live together, by part. An estimate.

    caches: see `_relaid`;
    kept until the commit: every layer's own rows, and the captured states, which exist twice while they are joined;
    stream: the residual stream, its normed copy and a layer's result;
    largest step: the greatest of one layer's attention, of the target or the draft (`_attention`), one layer's MLP or experts, a weight
        dequantised, the vocabulary's scores, the draft's scores.

    Arguments:
        packed_dense: bytes of the largest packed weight that is dequantised whole (experts are widened one at a time).
    """
    target, draft, item, width = sizes.target, sizes.draft, sizes.itemsize, sizes.target.hidden_size
    own = rows.run * item * sum(row_values(layer.attention) for layer in target.layers)
    captured = 2 * rows.run * sizes.captures * width * item
    steps = {
        "attention": max(_attention(layer.attention, rows.run, rows.per_slot, sizes) for layer in target.layers),
        "MLP": max(_mlp(layer.mlp, rows.run, sizes) for layer in target.layers),
        "a weight dequantised": packed_dense,
        # logits, logits by temperature, random bits, noise
        "logits": 4 * rows.scored * target.vocab_size * 4,
    }
    if draft is not None and sizes.spec.num_steps:
        # the draft extends its cache by the rows of a step, or by what waited since the last cycle
        per_slot = max(sizes.spec.topk, sizes.pending) if rows.drafted else rows.per_slot
        steps["draft attention"] = max(
            _attention(layer.attention, sizes.slots * per_slot, per_slot, sizes) for layer in draft.layers
        )
        steps["draft logits"] = 4 * rows.drafted * draft.draft_vocab_size * 4
    largest = max(steps, key=lambda name: steps[name])
    return {
        "caches in the compiler's layout": _relaid(sizes),
        "rows and captures until the commit": own + captured,
        "residual stream": 3 * rows.run * width * item,
        f"largest step ({largest})": steps[largest],
    }


def _relaid(sizes: Sizes) -> int:
    """With several slots and key/value heads a GPU's compiler wants positions next to widths, and keeps the caches in that layout while
    the loop runs: all of them once more, copied at the start and the end of every call."""
    if sizes.platform == "cpu" or sizes.slots == 1 or _in_kernels(sizes):
        return 0
    draft = sizes.draft.layers if sizes.draft is not None and sizes.spec.num_steps else ()
    several = lambda attention: isinstance(attention, GQAConfig) and attention.kv_heads > 1
    layers = tuple(layer for layer in (*sizes.target.layers, *draft) if several(layer.attention))
    return cache_bytes(layers, sizes.slots, sizes.max_len, sizes.itemsize)


def _in_kernels(sizes: Sizes) -> str | None:
    """Which kernel of ours reads the caches of this program (`select.attention_kernel`), if any: it takes them as they lie."""
    with compiling_for(sizes.platform):
        kernel = attention_kernel()
        # a cache of other sizes than whole units of copying stays with XLA
        if kernel == "hopper" and (sizes.itemsize != 2 or sizes.max_len % 8):
            return None
        return kernel if attention_form(sizes.max_len, None) == "pallas" else None


def _attention(attention: GQAConfig | MLAConfig, rows: int, per_slot: int, sizes: Sizes) -> int:
    """One layer's: queries, then the greater of scores beside weights, and of weights beside the values with unused rows cleared and the
    parts of the result that are summed over the cache. In our kernel: queries, result and what its ranges of the cache leave."""
    item, span, heads = sizes.itemsize, sizes.max_len + per_slot, attention.heads
    if isinstance(attention, MLAConfig):
        keys, values, kv_heads = attention.kv_lora_rank + attention.rope_dim, attention.kv_lora_rank, 1
    else:
        keys = values = attention.head_dim
        kv_heads = attention.kv_heads
    if kernel := _in_kernels(sizes):
        latent, shape = isinstance(attention, MLAConfig), (sizes.slots, per_slot, heads, kv_heads, keys, values)
        if kernel == "hopper":
            left = left_bytes(*shape, latent, sizes.max_len)
        else:
            # Pallas takes a while to import
            from eaglejax.kernels import tree_attention_portable as portable

            left = portable.left_bytes(*shape, sizes.max_len, latent=latent, item=item)
        if left is not None:
            return 2 * rows * heads * (keys + values) * item + left
    cleared = sizes.slots * sizes.max_len * kv_heads * values * item
    weights, scores = rows * heads * span * item, rows * heads * span * 4
    parts = splits_of(sizes.slots * kv_heads, per_slot * heads // kv_heads, values) * rows * heads * values * 4
    return 2 * rows * heads * keys * item + max(scores + weights, cleared + weights + parts)


def splits_of(products: int, height: int, width: int) -> int:
    """Parts into which a GPU's compiler cuts the long sum of a batch of `products` products of [height, width], so that their tiles fill
    the card's 132 cores: as seen in programs compiled for an H200 (32 for 4 products of [32, 128], 8 for 64 of [4, 128])."""
    tiles = products * -(-height // 64) * -(-width // 128)
    return max(8, 1 << (max(132 // tiles, 1).bit_length() - 1))


def _mlp(mlp: DenseConfig | MoEConfig, rows: int, sizes: Sizes) -> int:
    item, width = sizes.itemsize, sizes.target.hidden_size
    if isinstance(mlp, DenseConfig):
        return 3 * rows * mlp.width * item
    pairs = rows * mlp.topk
    if gather_pays(pairs, mlp.experts, sizes.platform):
        # the weights of the pairs' experts are read where they are multiplied, no copy of them is made
        return pairs * (3 * mlp.width * 4 + width * 4)
    # every row through one expert at a time, the sum in float32, and that expert's gate and up when they are taken out of the stack
    return rows * (3 * mlp.width * 4 + 2 * width * 4) + 2 * mlp.width * width * item


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())
