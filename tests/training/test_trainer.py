"""A draft trained on a tiny target: the loss falls, packed features equal single ones, the export comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eaglejax.checkpoint.builtin import builtin_path
from eaglejax.checkpoint.draft_loader import read_draft
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.load_report import LoadReport
from eaglejax.models.config import DenseConfig, DraftConfig, GQAConfig, LayerConfig, RopeConfig
from eaglejax.training import trainer
from eaglejax.training.data import Document, pack
from eaglejax.training.export import write_draft
from eaglejax.training.int8 import int8_rows, straight_through
from eaglejax.training.trainer import TrainSettings
from eaglejax.training.ttt import Text
from eaglejax.training.weights import first_weights, trained_weights

BOUNDARIES = (0, 1, 2)


@pytest.fixture(scope="module")
def target(data):
    return load_target(str(data / "targets" / "llama_tied_linear"), dtype="float32", report=LoadReport())


@pytest.fixture(scope="module")
def config(target):
    return DraftConfig(
        vocab_size=target.config.vocab_size,
        draft_vocab_size=64,
        hidden_size=target.config.hidden_size,
        target_hidden_size=target.config.hidden_size,
        boundaries=BOUNDARIES,
        layers=(LayerConfig(GQAConfig(4, 2, 8, RopeConfig(10000.0, 8)), DenseConfig(32)),),
        norm_eps=target.config.norm_eps,
    )


def on_device(text: Text) -> Text:
    return Text(*(jnp.asarray(part) for part in (text.tokens, text.positions, text.segments, text.loss)))


FAMILIES = ["llama_tied_linear", "glm4_moe", "qwen3_yarn", "deepseek_no_q_lora", "gpt_oss", "mistral_window"]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_features_are_those_of_each_document(data, name):
    """Attention of every kind (grouped, latent, with sinks, windows) and experts: a row's documents do not meet."""
    target = load_target(str(data / "targets" / name), dtype="float32", report=LoadReport())
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(3, 60, n).astype(np.int32), 1, False) for n in (9, 6)]
    packed = trainer.target_features(target, on_device(pack(documents, 16)), BOUNDARIES)
    for document, start in zip(documents, (0, 9), strict=True):
        alone = trainer.target_features(target, on_device(pack([document], len(document.tokens))), BOUNDARIES)
        part = slice(start, start + len(document.tokens))
        np.testing.assert_allclose(packed.captured[0, part], alone.captured[0], atol=2e-5)
        np.testing.assert_allclose(packed.last[0, part], alone.last[0], atol=2e-5)


def test_training_lowers_the_loss_and_export_brings_it_back(target, config, tmp_path):
    rng = np.random.default_rng(1)
    documents = [Document(rng.integers(3, 60, 24).astype(np.int32), 4, False) for _ in range(4)]
    text = on_device(pack(documents, 48))
    features = trainer.target_features(target, text, BOUNDARIES)
    target_ids = np.sort(rng.choice(target.config.vocab_size, 64, replace=False)).astype(np.int32)
    head = trainer.target_head(target)
    frozen = trainer.Frozen(target.embedding.weight[...], head, jnp.asarray(target_ids))
    settings = trainer.TrainSettings(unroll=3, compute_dtype="float32")
    scales = [float(np.sqrt(np.mean(np.square(part)))) for part in np.split(np.asarray(features.captured), 3, axis=-1)]
    weights = first_weights(config, np.asarray(head)[target_ids], np.asarray(target.norm.scale[...]), scales, seed=0)
    state = trainer.start(weights, settings)
    losses = []
    for _ in range(12):
        state, figures = trainer.train_step(
            state, frozen, text, features, jnp.float32(3e-3), config=config, settings=settings
        )
        losses.append(float(figures.loss))
    # the teacher's own entropy is the floor of a soft cross-entropy: it falls, to no fixed value
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    assert int(state.step) == 12 and figures.accuracies.shape == (3,)
    drafted = trainer.drafted_tokens(state.weights, frozen, text, features, config=config, settings=settings)
    assert drafted.shape == (3, *text.tokens.shape) and np.isin(np.asarray(drafted), target_ids).all()

    exact = {path: np.asarray(value) for path, value in state.weights.items()}
    for int8 in (False, True):
        folder = tmp_path / f"int8_{int8}"
        write_draft(folder, config, exact, target_ids, int8=int8)
        loaded = read_draft(folder, dtype="float32", target=target, report=LoadReport()).draft
        assert loaded.config.boundaries == BOUNDARIES and loaded.target_ids[...].tolist() == target_ids.tolist()
        back = trained_weights(loaded)
        assert back.keys() == exact.keys()
        for path, value in exact.items():
            if int8 and value.ndim > 1:
                assert np.linalg.norm(back[path] - value) < 0.02 * np.linalg.norm(value), path
            else:
                np.testing.assert_array_equal(back[path], value, err_msg=path)


def test_int8_rows():
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((8, 64)).astype(np.float32)
    weight[3] = 0
    quantised, factors = int8_rows(weight)
    assert quantised.dtype == np.int8 and factors.shape == (8, 1) and np.abs(quantised.astype(int)).max() <= 127
    plain = np.abs(weight).max(axis=1, keepdims=True) / 127
    error = ((quantised * factors - weight) ** 2).sum(axis=1)
    naive = ((np.rint(weight / np.maximum(plain, 1e-12)) * plain - weight) ** 2).sum(axis=1)
    assert (error <= naive + 1e-9).all() and error[3] == 0


def test_training_sees_the_rounding_of_the_export():
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((2, 8, 64)).astype(np.float32)
    seen = np.asarray(straight_through(jnp.asarray(weight)))
    quantised, factors = int8_rows(weight.reshape(16, 64))
    np.testing.assert_allclose(seen.reshape(16, 64), quantised * factors, rtol=0, atol=1e-6)
    assert np.abs(seen - weight).max() > 1e-3
    towards = rng.standard_normal(weight.shape).astype(np.float32)
    gradient = jax.grad(lambda w: jnp.sum(straight_through(w) * towards))(jnp.asarray(weight))
    np.testing.assert_array_equal(gradient, towards)


def test_muon_moves_matrices_by_their_orthogonal_part():
    """Every singular value of the direction is about the same, each matrix of a stack by itself; vectors go Adam's way."""
    rng = np.random.default_rng(4)
    gradient = {
        "matrix": rng.standard_normal((24, 40)) @ np.diag(np.logspace(0, -2, 40)),
        "stack": rng.standard_normal((2, 16, 32)) * np.asarray([1.0, 1e-3])[:, None, None],
        "vector": rng.standard_normal(32),
    }
    gradient = {name: jnp.asarray(value, jnp.float32) for name, value in gradient.items()}
    with jax.numpy_dtype_promotion("standard"):
        chain = trainer._optimiser(TrainSettings(optimiser="muon", clip=1e9))
        assert isinstance(chain, optax.GradientTransformation)
        found, _ = chain.update(gradient, chain.init(gradient), gradient)
        adam = optax.scale_by_adam(b1=0.9, b2=0.95, nesterov=True)
        expected, _ = adam.update(gradient, adam.init(gradient))
    for matrix, made_from in (
        (found["matrix"], gradient["matrix"]),
        *zip(found["stack"], gradient["stack"], strict=True),
    ):
        values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
        assert values.max() < 2 * np.median(values) and np.vdot(matrix, made_from) > 0
        assert 0.1 < np.sqrt(np.mean(np.asarray(matrix) ** 2)) < 0.3  # as large as Adam's usual step
    np.testing.assert_allclose(found["vector"], expected["vector"], rtol=1e-5)


@pytest.mark.parametrize("name", ["smollm2-eagle3", "smollm2-moe-eagle3"])
def test_shipped_draft_is_small_and_whole(name, smollm2_path):
    folder = builtin_path(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 7_000_000
    report = LoadReport()
    base = load_target(str(smollm2_path), dtype="float32", report=LoadReport())
    draft = read_draft(folder, dtype="float32", target=base, report=report).draft
    assert draft.config.boundaries == (2, 15, 27)
    assert draft.config.draft_vocab_size == draft.target_ids.shape[0] == 24_576
    assert not report.warnings
    weights = trained_weights(draft)
    assert all(np.isfinite(value).all() and float(np.abs(value).max()) > 0 for value in weights.values())
