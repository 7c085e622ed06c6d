"""The six planted faults on the built-in pair: each is named, and its fix restores the tokens per cycle."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eaglejax import EagleJaxEngine
from eaglejax.checkpoint.source import resolve
from eaglejax.measure.teacher_forced import Text
from eaglejax.measure.wiring_check import check_wiring

ANSWERS = Path(__file__).parents[1] / "data" / "smollm2" / "expected.json"
pytestmark = pytest.mark.slow


def load(draft="smollm2-eagle3", **settings):
    engine = EagleJaxEngine.from_pretrained("smollm2", draft=draft, check_wiring=False, **settings)
    cases = json.loads(ANSWERS.read_text(encoding="utf-8"))["greedy"]
    texts = [Text(case["prompt_ids"] + case["greedy_ids"], len(case["prompt_ids"])) for case in cases]
    return check_wiring(engine._pair, texts, "stored greedy answers")


@pytest.fixture(scope="module")
def right(smollm2_path):
    return load()


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """The built-in draft cut to low ids, its d2t as ids without t2d: it passes for offsets, and nothing in the file says otherwise."""
    source, folder = resolve("smollm2-eagle3").folder, tmp_path_factory.mktemp("indexed")
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    ids = tensors["d2t"] + np.arange(tensors["d2t"].size)
    kept = np.flatnonzero(ids + np.arange(ids.size) < config["vocab_size"])
    heads = {name: value[kept] for name, value in tensors.items() if name.startswith("lm_head.")}
    config["draft_vocab_size"] = int(kept.size)
    tensors = {name: value for name, value in tensors.items() if name != "t2d"} | heads | {"d2t": ids[kept]}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_no_false_alarm(right):
    assert not right.wrong and right.loaded.tokens_per_cycle > 2


FAULTS = {
    "captures one later": ({"capture": (3, 16, 28)}, "capture=(2, 15, 27)"),
    "captures one earlier": ({"capture": (1, 14, 26)}, "capture=(2, 15, 27)"),
    "the embedding captured": ({"capture": (0, 15, 27)}, "capture=(2, 15, 27)"),
    "norm_output": ({"draft_config": {"norm_output": True}}, "'norm_output': False"),
    "norm_before_residual": ({"draft_config": {"norm_before_residual": True}}, "'norm_before_residual': False"),
    "rope_theta": ({"draft_config": {"rope_theta": 100.0}}, "'rope_theta': 100000.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_mended(right, fault):
    settings, fix = FAULTS[fault]
    found = load(**settings)
    assert found.wrong and fix in found.verdict(), found.verdict()
    assert found.best.tokens_per_cycle == pytest.approx(right.loaded.tokens_per_cycle, abs=0.01)


def test_d2t_as_an_index(right, indexed):
    found = load(indexed)
    assert found.wrong and "draft_config={'d2t': 'ids'}" in found.verdict(), found.verdict()
    assert found.best.tokens_per_cycle > right.loaded.tokens_per_cycle - 0.5
    mended = load(indexed, draft_config={"d2t": "ids"})
    assert not mended.wrong and mended.loaded.tokens_per_cycle == found.best.tokens_per_cycle
