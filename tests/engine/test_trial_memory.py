"""Trial 40: the caches take the bytes of the formula, and no device ever holds experts that are not split."""

import jax
import numpy as np
import pairs
import pytest

from eaglejax import Auto, Sampling, Speculation
from eaglejax.checkpoint import streaming
from eaglejax.models.layers import leaves
from eaglejax.sharding.memory import Sizes, state_bytes, total

SPECS = [Speculation(1, 1), Speculation(3, 4, 24), Speculation(7, 2, 16)]
# values of a cached position: grouped keys and values (4 heads of 24), or one latent row (24 and 8 of RoPE); the draft's (8 heads of 16)
VALUES = {"qwen3_moe": 2 * 4 * 24, "deepseek_v3": 24 + 8}
DRAFT_VALUES = 2 * 8 * 16


def held(arrays) -> int:
    """Bytes of the first device."""
    device = jax.devices()[0]
    shards = [shard for array in jax.tree.leaves(arrays) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def state_of(engine, spec, slots: int):
    """The state that a wave of so many requests starts with, as real arrays."""
    programs = engine._programs_for(spec)
    request, padded = pairs.request_of(programs, pairs.prompts([3] * slots), Sampling(max_new_tokens=4), slots)
    return programs.start(request, padded)


@pytest.mark.parametrize("family", VALUES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trial_40_caches_take_the_bytes_of_the_formula(random_pairs, family, dtype):
    item, slots, length = (4 if dtype == "float32" else 2), 2, 64
    engine = pairs.load(*random_pairs[family], dtype=dtype, max_len=length)
    rest = set()
    for spec in SPECS:
        state = state_of(engine, spec, slots)
        assert held(state.target_cache) == slots * length * pairs.LAYERS * VALUES[family] * item
        assert held(state.draft_cache) == slots * length * 1 * DRAFT_VALUES * item  # one layer, whatever num_steps
        # the stated slack: num_steps + 1 rows between cycles, a token id and three captured states each
        pending = held((state.pending_tokens, state.pending_features))
        assert pending == slots * (spec.num_steps + 1) * (4 + 3 * pairs.HIDDEN * item)
        rest.add(held(state) - pending)
    assert len(rest) == 1
    plain = state_of(engine, Speculation(num_steps=0), slots)
    assert plain.draft_cache == [] and held((plain.pending_tokens, plain.pending_features)) == 0


@pytest.mark.parametrize("family", VALUES)
def test_trial_40_the_state_is_what_the_plan_says(random_pairs, family):
    """Fixed trees and "auto", whose window and beliefs are counted too: shapes alone, nothing is compiled."""
    engine = pairs.load(*random_pairs[family], max_len=64)
    pair, slots = engine._pair, 2
    for spec in (*SPECS, Speculation(num_steps=0), Auto((SPECS[0], SPECS[2])), Auto((SPECS[1],), window=9)):
        sizes = Sizes(pair.target.config, pair.draft.config, spec, slots, 64, 4)
        with pairs.jaxtyping_off():
            leaves_of = jax.tree.leaves(engine._programs_for(spec).state_shapes(slots))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves_of) == total(state_bytes(sizes)), spec


@pytest.mark.parametrize(("mesh", "data", "model"), [("model=8", 1, 8), ("data=2,model=4", 2, 4), ("model=2", 1, 2)])
@pytest.mark.parametrize("family", VALUES)
def test_trial_40_caches_on_a_mesh(random_pairs, family, mesh, data, model):
    """Slots over data, KV heads over model (4 on 8 devices: one each, twice); a latent row is whole on every device."""
    slots, length = 2, 64
    engine = pairs.load(*random_pairs[family], mesh=mesh, max_len=length, draft_placement="sharded")
    state = state_of(engine, SPECS[1], slots)
    parts = {"qwen3_moe": 2 * max(1, 4 // model) * 24, "deepseek_v3": VALUES["deepseek_v3"]}
    assert held(state.target_cache) == slots // data * length * pairs.LAYERS * parts[family] * 4
    assert held(state.draft_cache) == slots // data * length * DRAFT_VALUES // model * 4


@pytest.mark.parametrize("mesh", ["model=8", "data=2,model=4"])
@pytest.mark.parametrize("family", VALUES)
def test_trial_40_no_device_ever_holds_all_experts(random_pairs, monkeypatch, family, mesh):
    """While loading no block larger than a device's part is read or placed; afterwards every device has its own experts alone."""
    read, placed = {}, []
    reading, placing = streaming.read_leaf_block, streaming._place

    def read_block(recipe, reader, index, dtype, step):
        block = reading(recipe, reader, index, dtype, step)
        if any(".experts." in part.name for part in recipe):
            read[block.shape] = read.get(block.shape, 0) + 1
        return block

    monkeypatch.setattr(streaming, "read_leaf_block", read_block)
    monkeypatch.setattr(
        streaming, "_place", lambda block, devices: placed.append(block.shape) or placing(block, devices)
    )
    engine = pairs.load(*random_pairs[family], mesh=mesh)
    model = engine._pair.mesh.shape["model"]
    experts, width = 8, 16
    gate_up, down = (experts // model, 2, width, pairs.HIDDEN), (experts // model, pairs.HIDDEN, width)
    layers = pairs.LAYERS - (family == "deepseek_v3")
    assert read == {gate_up: layers * model, down: layers * model}  # each part once, also where two devices keep it
    assert not {shape for shape in placed if len(shape) > 2 and shape[0] == experts and width in shape}
    found = {path: v for path, v in leaves(engine._pair.target).items() if ".experts." in path}
    assert len(found) == 2 * layers
    for path, variable in found.items():
        array = variable.get_value()
        assert array.shape[0] == experts
        owners: dict[int, set] = {}
        for shard in array.addressable_shards:
            assert shard.data.shape == (gate_up if path.endswith("gate_up") else down), path
            owners.setdefault(shard.index[0].start or 0, set()).add(shard.device)
        assert len(owners) == model and sum(map(len, owners.values())) == 8
    whole = np.prod(gate_up) * model * 4
    assert max(shard.data.nbytes for v in found.values() for shard in v.get_value().addressable_shards) * model == whole
