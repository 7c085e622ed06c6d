"""The work of every phase of a profile, from the weights that the engine holds: the floors that measured times stand beside."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from eaglejax.config import Speculation
from eaglejax.loading import Pair
from eaglejax.measure.profile_phases import COLLECTIVES
from eaglejax.measure.roofline import Phase
from eaglejax.measure.work import Placed, attention_flops, experts_work, head_phase, layer_sums, layers_phase
from eaglejax.models.draft import Draft
from eaglejax.models.packed import PackedWeight
from eaglejax.models.target import Target
from eaglejax.sharding.local_shapes import Leaf, LocalModel, local_config
from eaglejax.sharding.memory import row_values
from eaglejax.sharding.mesh import MODEL, axis_size
from eaglejax.sharding.weights import weigh

# part of a verification -> the components of a plan it reads
COMPONENTS = {
    "attention": ("attention",),
    "experts": ("shared experts", "router"),  # and the experts that are touched
    "MLP": ("dense MLP",),
    "norms": ("norms",),
}


def placed(pair: Pair) -> tuple[Placed, Placed | None]:
    """Target and draft of an engine as a plan sees them, one device's part of each."""
    devices = axis_size(pair.mesh, MODEL)
    target = _placed(pair.target, devices, pair)
    if pair.draft is None:
        return target, None
    draft = _placed(pair.draft, devices, pair)
    split = pair.draft.split.layers or pair.draft.split.vocab.axis is not None
    return target, draft if split else replace(draft, devices=1)


def _placed(model: Target | Draft, devices: int, pair: Pair) -> Placed:
    config = local_config(model.config, model.split)  # pyright: ignore[reportArgumentType]
    local = LocalModel(config, model.split, model)
    packed = {".".join(map(str, path)): x.packing for path, x in nnx.iter_graph(model) if isinstance(x, PackedWeight)}
    return Placed(model.config, local, weigh(_held(model), packed), devices, pair.dtype.itemsize)


def _held(model: Target | Draft) -> list[Leaf]:
    """Every array with the shape of one device's part."""
    leaves = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array = variable[...]
        if jnp.issubdtype(array.dtype, jnp.number):
            shape = array.sharding.shard_shape(array.shape)
            leaves.append(Leaf(".".join(map(str, path)), shape, array.dtype.itemsize))
    return leaves


def cycle_work(target: Placed, draft: Placed | None, spec: Speculation, slots: int, context: int) -> dict[str, Phase]:
    """Phase of a profile -> the work of one device in one cycle.

    Arguments:
        slots: those of one device. context: tokens in the caches, all slots alike.
    """
    work = verify_work(target, slots * spec.nodes, slots, context)
    if draft is None or not spec.num_steps:
        return work
    pending, split, topk = slots * (spec.num_steps + 1), draft.local.draft_vocab_split, spec.topk
    work |= _apart("draft extend", layers_phase("", draft, pending, slots, context, fused=pending))
    for step in range(1, spec.num_steps + 1):
        rows = slots if step == 1 else slots * topk
        head = head_phase("", draft, rows, 2 + 2 * topk, split)
        layers = layers_phase("", draft, rows, slots, context) if step > 1 else Phase("", 0, 0)
        both = layers.collectives + head.collectives
        work |= _apart(f"draft step {step}", Phase("", layers.bytes + head.bytes, layers.flops + head.flops, both))
    return work


def verify_work(target: Placed, rows: int, slots: int, context: int) -> dict[str, Phase]:
    """One pass of the target by the parts of a verification. `rows`: of all slots of a device."""
    whole = layers_phase("", target, rows, slots, context)
    parts = {part: [0, 0] for part in COMPONENTS}
    for weight in target.weights:
        for part, components in COMPONENTS.items():
            if weight.component in components and weight.path != "norm.scale":
                parts[part][0] += weight.bytes
                parts[part][1] += 2 * weight.values * rows
    size = target.itemsize
    layers = target.local.config.layers
    parts["attention"][0] += slots * context * size * sum(row_values(layer.attention) for layer in layers)
    parts["attention"][1] += sum(attention_flops(layer, rows, context) for layer in layers)
    read, flops = experts_work(target, rows)
    parts["experts"][0] += read
    parts["experts"][1] += flops
    parts["embedding"] = [rows * target.whole.hidden_size * size, 0]
    assert sum(read for read, _ in parts.values()) == whole.bytes
    head = head_phase("", target, rows, 2, target.local.vocab_split)
    parts["head"] = [head.bytes, head.flops]
    work = {f"verify: {part}": Phase(part, both[0], both[1]) for part, both in parts.items() if any(both)}
    if sums := layer_sums(target, rows, 0) + head.collectives:
        work[f"verify: {COLLECTIVES}"] = Phase(COLLECTIVES, 0, 0, sums)
    return work


def prefill_work(target: Placed, draft: Placed | None, plan: list[tuple[int, int]], slots: int) -> dict[str, Phase]:
    """Both prefills, all calls of a plan (`prefill_plan`) together; each call reads the weights again."""
    work: dict[str, Phase] = {}
    for offset, rows in plan:
        calls = {"target prefill": layers_phase("", target, slots * rows, slots, offset)}
        if draft is not None:
            calls["draft prefill"] = layers_phase("", draft, slots * rows, slots, offset, fused=slots * rows)
        for name, phase in calls.items():
            for part, one in _apart(name, phase).items():
                before = work.get(part, Phase(part, 0, 0))
                work[part] = Phase(
                    part,
                    before.bytes + one.bytes,
                    before.flops + one.flops,
                    before.collectives + one.collectives,
                )
    return work


def _apart(name: str, phase: Phase) -> dict[str, Phase]:
    """A phase with its collectives as one of their own."""
    parts = {name: Phase(name, phase.bytes, phase.flops)}
    if phase.collectives:
        parts[f"{name}: {COLLECTIVES}"] = Phase(COLLECTIVES, 0, 0, phase.collectives)
    return parts
