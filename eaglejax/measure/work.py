"""Bytes read, FLOPs done and collectives per phase of a cycle, on the busiest device, from the weights of a plan.

Every weight outside the experts is read once a pass whatever the rows; experts as far as they are touched (`touched.py`, random
routing); caches as far as `context` reaches. An expert that is touched multiplies all rows of the pass, as the kernels have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eaglejax.config import Speculation
from eaglejax.measure.roofline import Collective, Phase
from eaglejax.measure.touched import busiest_touched, mean_touched
from eaglejax.models.config import DraftConfig, LayerConfig, MLAConfig, MoEConfig, TargetConfig
from eaglejax.sharding.local_shapes import LocalModel
from eaglejax.sharding.memory import row_values
from eaglejax.sharding.weights import Weight


@dataclass(frozen=True)
class Placed:
    """A model on the devices of the model axis: its part on one, the weights there, and the whole config."""

    whole: TargetConfig | DraftConfig
    local: LocalModel
    weights: list[Weight]
    devices: int
    itemsize: int


def touched(whole: MoEConfig, local: MoEConfig, rows: int, devices: int) -> float:
    """Experts that the busiest device reads for `rows` rows; where widths are split, every device reads all that are touched."""
    if local.experts == whole.experts:
        return mean_touched(whole.experts, whole.topk, rows)
    return busiest_touched(whole.experts, whole.topk, rows, devices, whole.groups, whole.topk_groups)


def layers_phase(name: str, placed: Placed, rows: int, slots: int, context: int, *, fused: int = 0) -> Phase:
    """One pass of `rows` rows through embedding and layers. `fused`: rows that a draft's fc reads in this pass."""
    read, flops = 0, 0
    for weight in placed.weights:
        if weight.component in ("embedding", "head", "experts", "target ids") or weight.path == "norm.scale":
            continue
        if weight.component == "fc" and not fused:
            continue
        read += weight.bytes
        flops += 2 * weight.values * (fused if weight.component == "fc" else rows)
    expert_bytes, expert_flops = experts_work(placed, rows)
    whole_layers, own_layers = placed.whole.layers, placed.local.config.layers
    cache = slots * context * placed.itemsize * sum(row_values(layer.attention) for layer in own_layers)
    attention = sum(attention_flops(layer, rows, context) for layer in own_layers)
    looked_up = rows * placed.whole.hidden_size * placed.itemsize
    assert len(whole_layers) == len(own_layers)
    return Phase(
        name,
        read + expert_bytes + cache + looked_up,
        flops + expert_flops + attention,
        layer_sums(placed, rows, fused),
    )


def experts_work(placed: Placed, rows: int) -> tuple[int, int]:
    """(bytes, FLOPs) of the experts of all layers on the busiest device."""
    read, flops = 0.0, 0.0
    for weight in placed.weights:
        if weight.component != "experts":
            continue
        assert weight.layer is not None
        whole, own = placed.whole.layers[weight.layer].mlp, placed.local.config.layers[weight.layer].mlp
        assert isinstance(whole, MoEConfig) and isinstance(own, MoEConfig)
        share = touched(whole, own, rows, placed.devices) / own.experts
        read += share * weight.bytes
        flops += 2 * rows * share * weight.values
    return round(read), round(flops)


def attention_flops(layer: LayerConfig, rows: int, context: int) -> int:
    attention = layer.attention
    if isinstance(attention, MLAConfig):
        width = 2 * attention.kv_lora_rank + attention.rope_dim
    else:
        width = 2 * attention.head_dim
    return 2 * rows * attention.heads * context * width


def layer_sums(placed: Placed, rows: int, fused: int) -> tuple[Collective, ...]:
    """At most two all-reduces a layer, one of the embedding where the vocabulary is split, one of fc."""
    size = rows * placed.whole.hidden_size * placed.itemsize
    parts = [Collective("all-reduce", "layers", sum(placed.local.summed), size)]
    if placed.local.vocab_split:
        parts.append(Collective("all-reduce", "embedding", 1, size))
    if fused and placed.local.fusion_split:
        parts.append(Collective("all-reduce", "fc", 1, fused * placed.whole.hidden_size * placed.itemsize))
    return tuple(part for part in parts if part.count)


def head_phase(name: str, placed: Placed, rows: int, values_per_row: int, split: bool, repeats: int = 1) -> Phase:
    """Final norm, scores over the vocabulary and the choice. `values_per_row`: 32-bit words that each device offers per row."""
    weights = [w for w in placed.weights if w.component == "head" or w.path == "norm.scale"]
    if not any(w.component == "head" for w in weights):  # tied
        weights += [w for w in placed.weights if w.component == "embedding"]
    offers = Collective("all-gather", "choice", repeats, placed.devices * rows * values_per_row * 4)
    return Phase(
        name,
        repeats * sum(w.bytes for w in weights),
        repeats * sum(2 * rows * w.values for w in weights),
        (offers,) if split else (),
    )


def plain_phases(target: Placed, slots: int, context: int) -> list[Phase]:
    """One step of plain decoding."""
    return [
        layers_phase("target", target, slots, slots, context),
        head_phase("head", target, slots, 2, target.local.vocab_split),
    ]


def cycle_phases(target: Placed, draft: Placed, spec: Speculation, slots: int, context: int) -> list[Phase]:
    """One cycle of speculation, in the order of the loop."""
    steps, topk = spec.num_steps, spec.topk
    pending, split = slots * (steps + 1), draft.local.draft_vocab_split
    choice = lambda name, rows, repeats: head_phase(name, draft, rows, 2 + 2 * topk, split, repeats)
    phases = [
        layers_phase("draft extend", draft, pending, slots, context, fused=pending),
        choice("draft head, level 1", slots, 1),
    ]
    if steps > 1:
        step = layers_phase("one draft step", draft, slots * topk, slots, context)
        phases += [
            repeated(f"draft steps ({steps - 1})", step, steps - 1),
            choice(
                f"draft heads, levels 2 to {steps}" if steps > 2 else "draft head, level 2", slots * topk, steps - 1
            ),
        ]
    rows = slots * spec.nodes
    return [
        *phases,
        layers_phase(f"verify ({spec.nodes} rows)", target, rows, slots, context),
        head_phase("head", target, rows, 2, target.local.vocab_split),
    ]


def repeated(name: str, phase: Phase, times: int) -> Phase:
    """The phase `times` over."""
    again = tuple(Collective(c.kind, c.what, c.count * times, c.bytes) for c in phase.collectives)
    return Phase(name, phase.bytes * times, phase.flops * times, again)


def is_draft(phase: Phase) -> bool:
    return phase.name.startswith(("draft", "one draft"))


def collectives_by_kind(phases: Iterable[Phase]) -> dict[str, tuple[int, int]]:
    """Kind -> (count, bytes of all results) over some phases."""
    sums: dict[str, tuple[int, int]] = {}
    for phase in phases:
        for part in phase.collectives:
            count, size = sums.get(part.kind, (0, 0))
            sums[part.kind] = (count + part.count, size + part.count * part.bytes)
    return sums
