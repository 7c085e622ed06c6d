"""Routed experts beside SmolLM2: with zeros for down projections it is the dense model, with random ones it is not."""

import json
from pathlib import Path

import numpy as np
import pytest

from eaglejax import EagleJaxEngine, Sampling, Speculation
from eaglejax.checkpoint import builtin
from eaglejax.checkpoint.builtin import builtin_path
from eaglejax.checkpoint.difference import difference_config
from eaglejax.checkpoint.difference_writer import RoutedLayer, write_difference
from eaglejax.checkpoint.reader import open_checkpoint
from eaglejax.checkpoint.source import resolve
from eaglejax.run_config import built_in_draft

LIMIT = 10_000_000  # bytes that such a model may take in the package
LAYERS, DENSE, EXPERTS, TOPK, WIDTH, HIDDEN = 30, 2, 8, 2, 24, 576
MESSAGES = [{"role": "user", "content": "Which planet is the largest?"}]


def random_layers(down: float) -> dict[int, RoutedLayer]:
    rng = np.random.default_rng(0)
    make = lambda scale, *shape: (scale * rng.standard_normal(shape)).astype(np.float32)
    return {
        layer: RoutedLayer(
            router=make(0.05, EXPERTS, HIDDEN),
            correction=make(0.05, EXPERTS),
            gate=make(0.05, EXPERTS, WIDTH, HIDDEN),
            up=make(0.05, EXPERTS, WIDTH, HIDDEN),
            down=make(down, EXPERTS, HIDDEN, WIDTH),
        )
        for layer in range(DENSE, LAYERS)
    }


def write(folder: Path, smollm2_path: Path, down: float) -> Path:
    base = open_checkpoint(smollm2_path).hf_config
    assert base is not None
    shape = {"dense_layers": DENSE, "experts": EXPERTS, "topk": TOPK, "width": WIDTH}
    written = write_difference(folder, difference_config(base, "smollm2", **shape), random_layers(down))
    assert written.total <= LIMIT
    return folder


@pytest.fixture(scope="module")
def dense(smollm2_path):
    return EagleJaxEngine.from_pretrained("smollm2", max_len=256, slots=1)


@pytest.fixture(scope="module")
def zero(tmp_path_factory, smollm2_path):
    """An engine whose experts add nothing yet."""
    folder = write(tmp_path_factory.mktemp("zero"), smollm2_path, 0.0)
    return EagleJaxEngine.from_pretrained(str(folder), max_len=256, slots=1)


def test_experts_that_add_nothing_leave_every_logit(dense, zero):
    """RoPE, norms, attention and FFNs are then SmolLM2's to the last bit or nearly."""
    token_ids = dense.tokenizer.apply_chat_template(MESSAGES)
    ours, theirs = zero.score(token_ids), dense.score(token_ids)
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-6)
    assert sorted(ours.experts) == list(range(DENSE, LAYERS)) and not theirs.experts
    touched = {int(i) for ids in ours.experts.values() for i in ids.reshape(-1)}
    assert touched == set(range(EXPERTS)) and all(ids.shape[1] == TOPK for ids in ours.experts.values())


def test_the_text_is_that_of_the_dense_model(zero, data):
    """Tokenizer, chat template and end of text are the base's: transformers' greedy answers of the dense model."""
    case = json.loads((data / "smollm2" / "expected.json").read_text())["greedy"][0]
    answer = zero.generate(case["prompt_ids"], Sampling(max_new_tokens=24))[0]
    assert answer.token_ids == case["greedy_ids"][:24]
    assert answer.text == zero.tokenizer.decode(answer.token_ids)
    assert zero.tokenizer.apply_chat_template(MESSAGES)[-1] == case["prompt_ids"][-1]


def test_the_load_report_names_base_and_difference(zero):
    report = str(zero.load_report)
    assert "glm4_moe, 30 layers, hidden 576" in report
    assert "a difference on the base smollm2 (" in report
    assert "224 routed experts in 28 layers, int8 with a scale for each row" in report
    stored = next(line for line in report.splitlines() if "in the file, float32 here" in line)
    assert "I8" in stored and "Q4_1" in stored and "not used" not in report


def test_the_shipped_experts_and_their_draft():
    """Small, whole, at work, and drafted for without a change of the text."""
    folder = builtin_path("smollm2-moe")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMIT
    engine = EagleJaxEngine.from_pretrained(
        "smollm2-moe", draft="smollm2-moe-eagle3", max_len=128, slots=1, tuning="none"
    )
    assert not engine.load_report.warnings
    sampling = Sampling(max_new_tokens=24)
    plain = engine.chat(MESSAGES, sampling, speculation=None)
    drafted = engine.chat(MESSAGES, sampling, speculation=Speculation(3, 1, 4))
    assert drafted.token_ids == plain.token_ids and drafted.stats.tau > 1.5
    score = engine.score(plain.prompt_token_ids + plain.token_ids)
    assert sorted(score.experts) == list(range(10, 30))
    used = np.stack(list(score.experts.values()))
    assert used.shape[1:] == (len(score.logits), 4) and len(np.unique(used)) == 16


@pytest.mark.slow
def test_random_experts_in_every_way(dense, tmp_path, smollm2_path, monkeypatch):
    """As a built-in name, in bfloat16, over a mesh, with the dense model's draft: one text."""
    monkeypatch.setattr(builtin, "SHIPPED", tmp_path)
    assert "smollm2-moe" not in builtin.builtin_names() and built_in_draft("smollm2-moe") is None
    write(tmp_path / "smollm2-moe", smollm2_path, 0.05)
    assert resolve("smollm2-moe").path == tmp_path / "smollm2-moe"
    one = EagleJaxEngine.from_pretrained("smollm2-moe", max_len=256, slots=1)
    token_ids = dense.tokenizer.apply_chat_template(MESSAGES)
    score = one.score(token_ids)
    assert np.abs(score.logits - dense.score(token_ids).logits).max() > 0.1
    mesh = EagleJaxEngine.from_pretrained("smollm2-moe", mesh="model=3", max_len=256, slots=1)
    np.testing.assert_allclose(mesh.score(token_ids).logits, score.logits, rtol=0, atol=5e-4)
    half = EagleJaxEngine.from_pretrained("smollm2-moe", dtype="bfloat16", max_len=256, slots=1)
    error = np.abs(half.score(token_ids).logits.astype(np.float32) - score.logits).max()
    assert 0 < error < 0.1 * np.abs(score.logits).max()
    draft = Path(__file__).parents[1] / "eaglejax" / "builtin" / "smollm2-eagle3"
    drafted = EagleJaxEngine.from_pretrained("smollm2-moe", draft=str(draft), max_len=256, slots=1)
    sampling = Sampling(max_new_tokens=16)
    texts = [engine.generate(MESSAGES, sampling)[0].token_ids for engine in (one, mesh, drafted)]
    assert texts[0] == texts[1] == texts[2]
