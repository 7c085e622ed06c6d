"""A draft whose head is the target's rows: what is learned of it, and its way through a folder into the engine."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.drafting import StandaloneDraft
from eaglejax.errors import ConfigError
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DenseConfig, GQAConfig, LayerConfig, RopeConfig, TargetConfig
from eaglejax.training import trainer, ttt_loss_and_grads
from eaglejax.training.data import Document, pack
from eaglejax.training.export import file_bytes, write_draft
from eaglejax.training.shape import draft_shape, usual_boundaries
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, frozen_paths, rebuild, trained_weights

BOUNDARIES, WIDE, VOCAB = (0, 1, 2), 96, 24


@pytest.fixture(scope="module")
def target(data):
    return load_target(str(data / "targets" / "llama_tied_linear"), dtype="float32", report=LoadReport())


def shape_of(target, own_head):
    return draft_shape(target.config, VOCAB, WIDE, own_head=own_head, boundaries=BOUNDARIES)


@pytest.fixture(scope="module")
def setting(target):
    """Text, features, vocabulary, frozen parts and first weights of a borrowed-head draft."""
    rng = np.random.default_rng(5)
    text = pack([Document(rng.integers(3, 60, 20).astype(np.int32), 4, False) for _ in range(4)], 40)
    text = Text(*(jnp.asarray(part) for part in (text.tokens, text.positions, text.segments, text.loss)))
    features = trainer.target_features(target, text, BOUNDARIES)
    ids = np.sort(rng.choice(target.config.vocab_size, VOCAB, replace=False)).astype(np.int32)
    head = trainer.target_head(target)
    frozen = trainer.Frozen(target.embedding.weight[...], head, jnp.asarray(ids))
    weights = first_weights(
        shape_of(target, False), np.asarray(head)[ids], np.asarray(target.norm.scale[...]), [1.0, 1.0, 1.0], seed=1
    )
    return text, features, ids, frozen, weights


def grads_of(target, setting, own_head):
    text, features, ids, frozen, weights = setting
    config = shape_of(target, own_head)
    if own_head:
        weights = {**weights, "head.weight": np.asarray(frozen.head)[ids]}
    draft = rebuild(config, weights, frozen.parameters(config), frozen.target_ids, jnp.float32)
    return ttt_loss_and_grads(
        StandaloneDraft(draft, LoadReport()),
        input_ids=text.tokens,
        loss_mask=text.loss,
        aux_hidden=features.captured,
        target_last_hidden=features.last,
        target_head=frozen.head,
        steps=3,
    )


def test_gradients_are_those_of_an_own_head_but_its_own(target, setting):
    borrowed, own = grads_of(target, setting, False), grads_of(target, setting, True)
    assert own.grads.keys() - borrowed.grads.keys() == {"lm_head.weight"}
    np.testing.assert_allclose(borrowed.step_losses, own.step_losses, rtol=1e-6)
    for name, value in borrowed.grads.items():
        np.testing.assert_allclose(value, own.grads[name], atol=1e-5 * np.abs(own.grads[name]).max(), err_msg=name)


def test_training_moves_all_but_the_borrowed(target, setting, tmp_path):
    text, features, ids, frozen, weights = setting
    config = shape_of(target, False)
    assert frozen_paths(config) == {"embedding.weight", "head.weight"} and "head.weight" not in weights
    settings = trainer.TrainSettings(unroll=3, compute_dtype="float32")
    state, losses = trainer.start(weights, settings), []
    for _ in range(8):
        state, figures = trainer.train_step(
            state, frozen, text, features, jnp.float32(3e-3), config=config, settings=settings
        )
        losses.append(float(figures.loss))
    assert losses[-1] < 0.95 * losses[0]
    trained = {path: np.asarray(value) for path, value in state.weights.items()}
    assert trained.keys() == weights.keys()
    still = [path for path, value in trained.items() if np.array_equal(value, weights[path])]
    assert not still

    own = rebuild(config, trained, frozen.parameters(config), frozen.target_ids, jnp.float32)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, config.hidden_size)), jnp.float32)
    for int8, tolerance in ((False, 1e-6), (True, 0.05)):
        folder = tmp_path / f"int8_{int8}"
        write_draft(folder, config, trained, ids, int8=int8)
        stored = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in stored and "embed_tokens.weight" not in stored
        assert json.loads((folder / "config.json").read_text())["intermediate_size"] == WIDE
        size = (folder / "model.safetensors").stat().st_size
        assert 0 < size - file_bytes(config, int8=int8) < 4096  # the header
        report = LoadReport()
        loaded = read_draft(folder, dtype="float32", target=target, report=report).draft
        assert f"the {VOCAB} rows of the draft vocabulary" in str(report)
        assert loaded.target_ids[...].tolist() == ids.tolist() and trained_weights(loaded).keys() == trained.keys()
        # the head itself is the target's, exactly; the rest within the rounding
        np.testing.assert_array_equal(loaded.head.weight[...], np.asarray(frozen.head)[ids])
        right, found = own.logits(own.fuse(features.captured)), loaded.logits(loaded.fuse(features.captured))
        assert float(jnp.abs(found - right).max()) <= tolerance * float(jnp.abs(right).max())
        right, found = drafted(own, text, features, frozen), drafted(loaded, text, features, frozen)
        same = (right == found)[:, np.asarray(text.segments) >= 0]
        assert same.all() if not int8 else same.mean() > 0.9
        assert loaded.logits(hidden).shape == (1, 9, VOCAB)


def drafted(draft, text, features, frozen):
    """What the unroll drafts with a module's weights."""
    config = replace(draft.config, own_head=False)
    settings = trainer.TrainSettings(unroll=3, compute_dtype="float32")
    return np.asarray(
        trainer.drafted_tokens(trained_weights(draft), frozen, text, features, config=config, settings=settings)
    )


def test_shape_refuses(target):
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        draft_shape(target.config, target.config.vocab_size + 1, 8, boundaries=BOUNDARIES)
    assert target.config.num_layers < 6
    with pytest.raises(ConfigError, match="no usual captures"):
        usual_boundaries(target.config)


def test_a_wide_draft_with_a_borrowed_head_may_be_shipped():
    """16,384 of SmolLM2's ids and an MLP of 2,496 in 7 MB; an own head of that size alone takes more."""
    layer = LayerConfig(GQAConfig(9, 3, 64, RopeConfig(100000.0, 64)), DenseConfig(1536))
    fields = dict(
        family="llama", tie_embeddings=True, vocab_size=49152, hidden_size=576, norm_eps=1e-5, max_position=8192
    )
    target = TargetConfig(layers=(layer,) * 30, **fields)
    assert file_bytes(draft_shape(target, 16384, 2496, own_head=False), int8=True) < 6_990_000
    assert file_bytes(draft_shape(target, 16384, 768, own_head=True), int8=True) > 12_000_000
