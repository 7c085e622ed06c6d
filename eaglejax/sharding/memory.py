"""Bytes of the buffers of one device beside its weights: caches, the loop's state, temporaries.

Caches and state are those of `speculation/state.py`, exact. Temporaries are an estimate by the formula below: the largest set of arrays
that has to be live at once, counted as XLA's GPU form of the program keeps them (not the CPU's, which widens operands to float32).
"""

from __future__ import annotations

from dataclasses import dataclass

from eaglejax.config import Auto, Speculation
from eaglejax.kernels.experts import gather_pays
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.speculation.adapt import DIFFICULTIES
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
    if isinstance(sizes.spec, Auto):  # log-weights, time spent, cycles by choice
        counters += slots * 4 * (len(DIFFICULTIES) + 1 + len(sizes.spec.choices))
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

    kept until the commit: every layer's own rows, and the captured states, which exist twice while they are joined;
    stream: the residual stream, its normed copy and a layer's result;
    largest step: the greatest of one layer's attention (queries, scores over the whole cache in float32 and as weights, the result in
        float32, one layer's values with unused rows cleared), one layer's MLP or experts (one expert at a time, or, for few rows,
        the weights of every row's experts gathered), the vocabulary's scores, the draft's scores. `packed_dense`: the largest packed
        weight that is dequantised whole, which a step may need beside them.
    """
    target, item, width = sizes.target, sizes.itemsize, sizes.target.hidden_size
    own = rows.run * item * sum(row_values(layer.attention) for layer in target.layers)
    captured = 2 * rows.run * sizes.captures * width * item
    steps = {
        "attention": max(_attention(layer.attention, rows, sizes) for layer in target.layers),
        "MLP": max(_mlp(layer.mlp, rows.run, sizes) for layer in target.layers),
        # logits, then scaled and filtered, then with noise
        "logits": 3 * rows.scored * target.vocab_size * 4,
    }
    if sizes.draft is not None and sizes.spec.num_steps:
        steps["draft logits"] = 3 * rows.drafted * sizes.draft.draft_vocab_size * 4
    largest = max(steps, key=lambda name: steps[name])
    return {
        "rows and captures until the commit": own + captured,
        "residual stream": 3 * rows.run * width * item,
        f"largest step ({largest})": steps[largest],
        "a weight dequantised": packed_dense,
    }


def _attention(attention: GQAConfig | MLAConfig, count: Rows, sizes: Sizes) -> int:
    item, rows, span = sizes.itemsize, count.run, sizes.max_len + count.per_slot
    if isinstance(attention, MLAConfig):
        keys, values, kept = attention.kv_lora_rank + attention.rope_dim, attention.kv_lora_rank, attention.kv_lora_rank
    else:
        keys = values = attention.head_dim
        kept = attention.kv_heads * attention.head_dim
    queries = 2 * rows * attention.heads * keys * item
    scores = rows * attention.heads * span * (4 + item)
    mixed = 2 * rows * attention.heads * values * 4
    return queries + scores + mixed + sizes.slots * sizes.max_len * kept * item


def _mlp(mlp: DenseConfig | MoEConfig, rows: int, sizes: Sizes) -> int:
    item, width = sizes.itemsize, sizes.target.hidden_size
    if isinstance(mlp, DenseConfig):
        return 3 * rows * mlp.width * item
    pairs = rows * mlp.topk
    if gather_pays(pairs, mlp.experts, sizes.platform):
        # gate and up of every pair's expert; down is gathered once these are spent, into the same space
        return pairs * (2 * mlp.width * width * item + 3 * mlp.width * 4 + width * 4)
    # every row through one expert at a time, the sum in float32, and that expert's weights when they are taken out of the stack
    return rows * (3 * mlp.width * 4 + 2 * width * 4) + 3 * mlp.width * width * item


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())
