"""Memory of a train step, from the compiled program alone: linear in the length, and no logits of all places."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, RopeConfig, TargetConfig
from eaglejax.models.draft import Draft
from eaglejax.models.layers import leaves
from eaglejax.training import trainer
from eaglejax.training.shape import draft_shape
from eaglejax.training.ttt import Text
from eaglejax.training.weights import frozen_paths

VOCAB, DRAFT_VOCAB, WIDTH, BATCH, UNROLL = 160_000, 32_000, 32, 2, 7
LENGTHS = (512, 1024, 2048)


@cache
def compiled(length):
    """The train step of a small draft beside a large vocabulary; nothing is allocated."""
    layer = LayerConfig(GQAConfig(2, 1, 16, RopeConfig(1e4, 16)), DenseConfig(64))
    fields = dict(family="llama", tie_embeddings=False, norm_eps=1e-5, max_position=4096)
    target = TargetConfig(vocab_size=VOCAB, hidden_size=WIDTH, layers=(layer,) * 8, **fields)
    config = draft_shape(target, DRAFT_VOCAB, 64)
    settings = trainer.TrainSettings(unroll=UNROLL, compute_dtype="float32")
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    places, int32 = (BATCH, length), jnp.int32
    given = {
        "weights": {path: of(*shape) for path, shape in shapes(config).items()},
        "text": [of(*places, dtype=dtype) for dtype in (int32, int32, int32, jnp.bool_)],
        "frozen": [of(VOCAB, WIDTH), of(VOCAB, WIDTH), of(DRAFT_VOCAB, dtype=int32)],
        "features": [of(*places, 3 * WIDTH), of(*places, WIDTH)],
        "rate": of(),
    }

    @jax.jit
    def step(given):
        return trainer.train_step(
            trainer.start(given["weights"], settings),
            trainer.Frozen(*given["frozen"]),
            Text(*given["text"]),
            trainer.TargetFeatures(*given["features"]),
            given["rate"],
            config=config,
            settings=settings,
        )

    return step.lower(given).compile()


def shapes(config):
    draft = nnx.eval_shape(lambda: Draft(config, dtype=jnp.float32))
    return {path: leaf.shape for path, leaf in leaves(draft).items() if path not in frozen_paths(config)}


def test_memory_grows_linearly_with_the_length():
    sizes = [compiled(length).memory_analysis().temp_size_in_bytes for length in LENGTHS]
    growth = [b - a for a, b in zip(sizes, sizes[1:], strict=False)]
    # twice the places more, twice the memory more; a t x t array would make it four times

    assert growth[1] == pytest.approx(2 * growth[0], rel=0.15), sizes


def test_no_array_of_all_places_by_the_vocabulary():
    text = compiled(LENGTHS[-1]).as_text()
    places = BATCH * LENGTHS[-1]
    found = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    whole = [dims for dims in found if VOCAB in dims and size_of(dims) >= places * VOCAB]
    assert not whole
    squares = [dims for dims in found if dims.count(LENGTHS[-1]) > 1]
    assert not squares


def size_of(dims):
    total = 1
    for n in dims:
        total *= n
    return total
