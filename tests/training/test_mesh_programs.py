"""The programs of a training run on a mesh: what crosses between devices, and the features of every family of targets."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from eaglejax.loading import load_pair
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.sharding.collectives import read_collectives
from eaglejax.sharding.mesh import build_mesh
from eaglejax.training import programs, trainer
from eaglejax.training.data import Document, batch_of, pack
from eaglejax.training.shape import draft_shape
from eaglejax.training.weights import frozen_paths

MESH = "data=2,model=2"


def test_what_crosses_between_devices(data):
    """The target's pass gathers no weight and sums twice a layer; a train step sums gradients and figures, once."""
    mesh = build_mesh(MESH)
    pair = load_pair(str(data / "targets" / "glm4_moe"), None, capture="auto", dtype="float32", mesh=mesh)
    config = draft_shape(pair.target.config, 40, 32, boundaries=(0, 1, 2))
    text = pack([Document(np.arange(3, 40, dtype=np.int32), 4, False) for _ in range(4)], 40)
    text = programs.put_text(text, mesh, P("data"))
    one_pass = programs.TargetPass(pair.target, config.boundaries, mesh, P("data"))
    found = read_collectives(one_pass.lower(text).compile().as_text())
    assert {one.kind for one in found} == {"all-reduce"}
    assert 1 < len(found) <= 1 + 2 * pair.target.config.num_layers  # the embedding's, and two of each layer

    weights = {path: np.ones(shape, np.float32) for path, shape in shapes(config).items()}
    ids = programs.whole(np.arange(40, dtype=np.int32), mesh)
    embedding = programs.whole(pair.target.embedding.weight[...], mesh)
    frozen = trainer.Frozen(embedding, programs.whole(trainer.target_head(pair.target), mesh), ids)
    quick = trainer.TrainSettings(unroll=2, compute_dtype="float32")
    state = programs.whole(trainer.start(weights, quick), mesh)
    step = programs.TrainStep(config, quick, 4, mesh)
    compiled = step.lower(state, frozen, text, one_pass(text), 1e-3).compile()
    found = read_collectives(compiled.as_text())
    assert {one.kind for one in found} == {"all-reduce"} and not any(one.loops for one in found)
    size = 4 * sum(value.size for value in weights.values())
    assert size <= sum(one.bytes for one in found) <= size + 256


def shapes(config):
    draft = nnx.eval_shape(lambda: Draft(config, dtype=jnp.float32))
    return {path: leaf.shape for path, leaf in leaves(draft).items() if path not in frozen_paths(config)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_oss", "kimi_k25", "deepseek_no_q_lora", "mistral_window", "qwen3_moe_sparse_step"]
)
def test_features_of_every_family_are_those_of_one_device(data, name):
    text = pack([Document(np.arange(3 + n, 35 + n, dtype=np.int32), 4, False) for n in range(6)], 80)
    parts = []
    for mesh in (None, build_mesh("data=2,model=4")):
        pair = load_pair(str(data / "targets" / name), None, capture="auto", dtype="float32", mesh=mesh)
        rows = P("data")
        assert text.tokens.shape[0] % 2 == 1
        even = batch_of(text, np.arange(text.tokens.shape[0]), text.tokens.shape[0] + 1)
        real = np.asarray(even.segments) >= 0
        features = programs.TargetPass(pair.target, (0, 1, 2), mesh, rows)(programs.put_text(even, mesh, rows))
        parts.append([np.asarray(part)[real] for part in (features.captured, features.last)])
    for found, expected in zip(parts[1], parts[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
