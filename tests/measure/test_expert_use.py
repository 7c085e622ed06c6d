"""Figures of experts, on a tiny random mixture, against what other parts of the package say of the same model."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eaglejax.checkpoint.difference_writer import write_difference
from eaglejax.checkpoint.target_loader import load_target
from eaglejax.errors import ConfigError, PromptError
from eaglejax.measure.expert_use import cut_windows, distinct, mean_loss, measure_experts
from eaglejax.teacher import Teacher

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from difference_files import EXPERTS, TOPK, small_config, small_layers, write_base  # noqa: E402

TOOL = Path(__file__).parents[2] / "tools" / "measure_experts.py"
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(0, 10, count).tolist() for count in (40, 24, 7, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture whose last expert is never chosen."""
    folder = tmp_path_factory.mktemp("experts")
    write_base(folder / "base")
    layers = small_layers()
    correction = np.array([0, 0.1, 0, -10], np.float32)
    layers = {index: replace(layer, correction=correction) for index, layer in layers.items()}
    write_difference(folder / "moe", small_config(), layers)
    roll = lambda layer: {part: np.roll(getattr(layer, part), 1, axis=0) for part in ("gate", "up", "down")}
    write_difference(
        folder / "shifted", small_config(), {index: replace(layer, **roll(layer)) for index, layer in layers.items()}
    )
    return folder


@pytest.fixture(scope="module")
def windows():
    return cut_windows(TEXTS, 24)


@pytest.fixture(scope="module")
def use(folder, windows):
    target = load_target(folder / "moe")
    use = measure_experts(target, windows)
    assert mean_loss(target, windows) == use.loss, "the model itself was changed"
    return use


def test_windows(windows):
    assert windows == [TEXTS[0][:24], TEXTS[0][24:], TEXTS[1], TEXTS[2]]
    with pytest.raises(PromptError, match="no text of two tokens"):
        cut_windows([[3]], 24)
    with pytest.raises(ConfigError, match="window: out of range; found 1"):
        cut_windows(TEXTS, 1)


def test_losses(folder, windows, use):
    """Against the teacher's logits, the base, and a model that was written with its experts shifted."""
    teacher, total = Teacher(load_target(folder / "moe"), None), 0.0
    for ids in windows:
        logits = teacher.score(ids).logits.astype(np.float64)[:-1]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_p[np.arange(len(ids) - 1), ids[1:]].sum()
    assert use.predicted == sum(map(len, windows)) - len(windows)
    assert use.loss == pytest.approx(total / use.predicted, abs=1e-5)
    base = mean_loss(load_target(folder / "base"), windows)
    assert use.loss_without == pytest.approx(base, abs=1e-6)
    shifted = mean_loss(load_target(folder / "shifted"), windows)
    assert use.loss_shifted == pytest.approx(shifted, abs=1e-6)
    assert len({round(loss, 4) for loss in (use.loss, use.loss_without, use.loss_shifted)}) == 3


def test_choices(folder, windows, use):
    teacher = Teacher(load_target(folder / "moe"), None)
    chosen = [teacher.score(ids).experts[1] for ids in windows]
    counts = np.bincount(np.concatenate(chosen).reshape(-1), minlength=EXPERTS)
    np.testing.assert_allclose(use.shares[1], counts / counts.sum())
    assert list(use.shares) == [1] and use.dead == {1: [3]}
    want = {
        rows: np.mean([len(set(ids[at : at + rows].reshape(-1).tolist())) for ids in chosen for at in range(0, len(ids) - rows + 1, rows)])
        for rows in (1, 4, 16)
    }  # fmt: skip
    assert use.touched == pytest.approx(want) and use.touched[1] == TOPK and use.touched[16] > TOPK


def test_runs_that_no_window_holds_are_left_out(folder):
    assert set(measure_experts(load_target(folder / "moe"), [[1, 2, 3, 4, 5]]).touched) == {1, 4}
    assert len(distinct(np.array([[0, 1]], np.int32), 4, EXPERTS)) == 0


def test_a_dense_model_is_refused(folder, windows):
    with pytest.raises(ConfigError, match="has no routed experts; found llama"):
        measure_experts(load_target(folder / "base"), windows)


def test_the_tool(folder, use, capsys):
    spec = importlib.util.spec_from_file_location("measure_experts", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    lines = "".join(json.dumps({"token_ids": ids}) + "\n" for ids in TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    common = ["--text", str(folder / "texts.jsonl"), "--window", "24", "--json", str(folder / "figures.json")]
    tool.main(["--model", str(folder / "moe"), "--against", str(folder / "base"), *common])
    figures = json.loads((folder / "figures.json").read_text())
    assert (figures["loss"], figures["windows"], figures["texts"]) == (pytest.approx(use.loss), 4, 4)
    assert figures["loss_against"] == pytest.approx(use.loss_without, abs=1e-6)
    said = capsys.readouterr().out
    assert f"loss {use.loss:.4f} nats/token" in said and "dead experts (share below 0.1 %): 1 of 4" in said
    with pytest.raises(SystemExit, match="error: model: has no routed experts"):
        tool.main(["--model", str(folder / "base"), *common])
