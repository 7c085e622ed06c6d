"""A draft on a mesh lies whole on every device, also what it borrows from a target that is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from quantised_files import config_of, random_tensors, write_case

from eaglejax.checkpoint.draft_loader import facts_of, inspect_draft, load_plan
from eaglejax.checkpoint.target_loader import build_target, load_target, open_target
from eaglejax.load_report import LoadReport
from eaglejax.models.layers import leaves
from eaglejax.models.target import Target

VOCAB, D = 64, 32


def mesh_of():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def draft_folder(folder, draft_vocab):
    rng = np.random.default_rng(3)
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    layer = "midlayer."
    tensors = {
        "fc.weight": make(D, 3 * D),
        "norm.weight": make(D),
        f"{layer}hidden_norm.weight": make(D),
        f"{layer}input_layernorm.weight": make(D),
        f"{layer}post_attention_layernorm.weight": make(D),
        f"{layer}self_attn.q_proj.weight": make(D, 2 * D),
        f"{layer}self_attn.k_proj.weight": make(16, 2 * D),
        f"{layer}self_attn.v_proj.weight": make(16, 2 * D),
        f"{layer}self_attn.o_proj.weight": make(D, D),
        f"{layer}mlp.gate_proj.weight": make(48, D),
        f"{layer}mlp.up_proj.weight": make(48, D),
        f"{layer}mlp.down_proj.weight": make(D, 48),
    }
    if draft_vocab < VOCAB:
        tensors["d2t"] = np.arange(draft_vocab, dtype=np.int64)
    config = dict(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        hidden_size=D,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        hidden_act="silu",
        max_position_embeddings=128,
        rope_theta=10000.0,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    return write_case(folder, config, tensors)


@pytest.mark.parametrize("draft_vocab", [VOCAB, 24])
def test_draft_is_whole_on_every_device(tmp_path, draft_vocab):
    config = config_of("glm4_moe")
    folder = write_case(tmp_path / "target", config, random_tensors(config))
    mesh, report = mesh_of(), LoadReport()
    reading, reader = open_target(folder)

    def build() -> Target:
        target = Target(reading.config, dtype="float32")
        for owner in (target.embedding, target.head):
            owner.weight = nnx.Param(jnp.zeros((VOCAB // 4, D)), axes=("v", "d"), mesh_axes=("model", None))
        return target

    split = build_target(reading, reader, "float32", report, mesh, build)
    assert split.head.weight.get_value().addressable_shards[0].data.shape == (VOCAB // 4, D)
    facts = facts_of(reading.config)
    plan = inspect_draft(draft_folder(tmp_path / "draft", draft_vocab), target=facts, report=report)
    got = load_plan(plan, dtype="float32", target=split, report=report, mesh=mesh).draft
    want = load_plan(plan, dtype="float32", target=load_target(folder), report=report).draft
    ours, theirs = leaves(got), leaves(want)
    assert ours.keys() == theirs.keys() and {"embedding.weight", "head.weight"} <= ours.keys()
    for name, variable in [*ours.items(), ("ids", got.target_ids)]:
        expected = np.asarray((theirs | {"ids": want.target_ids})[name][...])
        shards = variable.get_value().addressable_shards
        assert len(shards) == 8
        for shard in shards:
            np.testing.assert_array_equal(shard.data, expected, err_msg=name)
    # a copy of its own, not the target's split array
    assert ours["embedding.weight"].get_value() is not split.embedding.weight.get_value()
