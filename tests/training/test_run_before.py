"""What is known before the target answers is refused before it answers; what another run left is not trained on."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_run import settings, stop_after, write_answers

from eaglejax.errors import CheckpointError, ConfigError, PromptError
from eaglejax.training import run, run_parts, starts
from eaglejax.training.run import train

QUICK = dict(steps=4, save_every=2, evaluate_every=4, evaluate_prompts=2, evaluate_tokens=6)
FROM_DRAFT = dict(mlp=None, vocab=None, boundaries=None)


@pytest.fixture(scope="module")
def files(tmp_path_factory, data):
    return write_answers(tmp_path_factory.mktemp("data"), data)


@pytest.fixture(scope="module")
def first(tmp_path_factory, data, files):
    out = tmp_path_factory.mktemp("runs") / "first"
    train(settings(out, data, files, **QUICK))
    return out


@pytest.fixture
def no_answers(monkeypatch):
    def asked(*given, **named):
        raise AssertionError("the target was asked")

    monkeypatch.setattr(run_parts, "regenerate", asked)


def write_prompts(file, prompts):
    file.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in prompts))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 65}, "vocab: must lie within the target's vocabulary; found 65; expected 1..64"),
        ({"boundaries": (1, 1, 2)}, "boundaries: not boundaries of the target"),
        ({"boundaries": (1, 2, 9)}, "boundaries: not boundaries of the target"),
        ({"start": "/nowhere", **FROM_DRAFT}, "/nowhere"),
        ({"start": "FIRST", "mlp": 64}, "mlp: is that of the draft to go on from"),
        ({"start": "FIRST", **FROM_DRAFT, "head": "target"}, "head: is that of the draft to go on from; found target"),
    ],
)
def test_impossible_drafts(tmp_path, data, files, first, no_answers, changes, message):
    changes = {**changes, "start": str(first)} if changes.get("start") == "FIRST" else changes
    with pytest.raises((ConfigError, CheckpointError)) as error:
        train(settings(tmp_path / "run", data, files, regenerate=True, **changes))
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()  # nothing was put into it


def test_a_setting_changed_on_resume(first, data, files, no_answers):
    with pytest.raises(ConfigError, match=r"first.*belongs to another run; found rate begun with 0\.003, now 0\.1"):
        train(settings(first, data, files, **QUICK, rate=0.1, regenerate=True))
    held = write_prompts(files[1].with_name("other.jsonl"), [[9, 8, 7], [6, 5]])
    with pytest.raises(ConfigError, match="held_out_prompts begun with"):
        train(settings(first, data, (files[0], held), **QUICK, regenerate=False))


def test_another_vocabulary_in_the_start_folder(tmp_path, data, files, first):
    """The weights of a row belong to its id: a map of the same size is another draft."""
    start = tmp_path / "start"
    shutil.copytree(first / "draft", start)
    config = settings(tmp_path / "run", data, files, **{**QUICK, **FROM_DRAFT}, start=str(start))
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=stop_after(3))
    moved = tmp_path / "moved"
    shutil.copytree(start, moved)
    tensors = load_file(start / "model.safetensors")
    ids = np.arange(40) + tensors["d2t"]
    unused = np.setdiff1d(np.arange(64), ids)
    ids = np.sort(np.concatenate([ids[:30], unused[:10]]))
    tensors["d2t"], tensors["t2d"] = ids - np.arange(40), np.isin(np.arange(64), ids)
    save_file(tensors, start / "model.safetensors")
    with pytest.raises(ConfigError, match="vocabulary begun with"):
        train(config)
    # a checkpoint of before says nothing of it but its ids
    facts = tmp_path / "run" / "checkpoints" / "2" / "facts" / "metadata"
    values = json.loads(facts.read_text())
    values["run"] = {key: value for key, value in values["run"].items() if key not in ("vocabulary", "start_draft")}
    facts.write_text(json.dumps({**values, "run": {**values["run"], "start": str(start)}}))
    with pytest.raises(ConfigError, match="its draft vocabulary holds other ids"):
        train(config)
    # the same draft in another place is the same
    assert train(replace(config, start=str(moved))).step == 4


def test_a_vocabulary_of_no_answer(tmp_path, data, files, first):
    start = tmp_path / "start"
    shutil.copytree(first / "draft", start)
    rows = tmp_path / "rows.jsonl"
    ids = np.arange(40) + load_file(start / "model.safetensors")["d2t"]
    other = [int(i) for i in np.setdiff1d(np.arange(64), ids)[:8]]
    rows.write_text(json.dumps({"prompt_ids": [5, 6], "token_ids": other}) + "\n")
    with pytest.raises(ConfigError, match="holds no token of the answers.*found 0 of 8 answer tokens in its 40 ids"):
        train(settings(tmp_path / "run", data, (rows, files[1]), **{**QUICK, **FROM_DRAFT}, start=str(start)))


def test_a_run_s_folder_is_a_start(tmp_path, data, files, first):
    config = settings(tmp_path / "run", data, files, **{**QUICK, **FROM_DRAFT}, start=str(first))
    assert starts.plan_draft(config, run.load_pair(config.model, None, capture="auto", dtype="float32")).ids is not None


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/nothing"])
def test_folders_that_cannot_be(tmp_path, data, files, monkeypatch, out):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(run, "load_pair", lambda *given, **named: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match="is a file|cannot be written") as error:
        train(settings(tmp_path / out, data, files))
    assert error.value.fix and str(error.value.where) in str(tmp_path / out)


@pytest.mark.parametrize("name", ["training.csv", "answers.jsonl"])
def test_files_that_cannot_be_written(tmp_path, data, files, monkeypatch, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    monkeypatch.setattr(run, "load_pair", lambda *given, **named: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match=f"{name}: cannot be written; found Is a directory"):
        train(settings(tmp_path / "run", data, files))


def test_a_file_where_checkpoints_go(tmp_path, data, files, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    monkeypatch.setattr(run, "load_pair", lambda *given, **named: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match="run/checkpoints: is a file; expected a folder"):
        train(settings(tmp_path / "run", data, files))


@pytest.mark.parametrize("name", ["training.csv", "curves.svg"])
def test_a_disk_that_fills_up(tmp_path, data, files, monkeypatch, name):
    def full(self, *given, **named):
        raise OSError(28, "No space left on device", str(self))

    if name == "curves.svg":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        monkeypatch.setattr(os, "replace", lambda a, b: full(b))
    with pytest.raises(
        CheckpointError, match=f"{name}: cannot be written; found No space left.*free space there and run"
    ):
        run.Curves(tmp_path, 2, 2).begin(0)
        run.Curves(tmp_path, 2, 2).draw()


def test_a_kill_at_the_start_keeps_the_figures(tmp_path, monkeypatch):
    curves = run.Curves(tmp_path, 1, 1)
    curves.begin(0)
    curves.add(run.TRAINING, [1, 0, 0.1, 2.0, 0.5, 2.0, 0.1])
    before = (tmp_path / run.TRAINING).read_bytes()

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        curves.begin(1)
    assert (tmp_path / run.TRAINING).read_bytes() == before


def test_held_out_prompts_are_not_trained_on(tmp_path, data, files):
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    held = write_prompts(tmp_path / "held.jsonl", [rows[0]["prompt_ids"], rows[3]["prompt_ids"], [5, 6, 7]])
    said = []
    train(settings(tmp_path / "run", data, (files[0], held), **QUICK), said.append)
    assert "2 documents left out of the training: their prompts are held out" in said
    with pytest.raises(ConfigError, match="every prompt of the data is also a held-out one.*found all 16 documents"):
        train(settings(tmp_path / "all", data, (files[0], files[0]), **QUICK))


def test_held_out_prompts_among_those_set_aside(tmp_path, data):
    """The same prompt twice in the data: what is set aside takes the other with it."""
    rows = [{"prompt_ids": [3 + n % 20, 4], "token_ids": [5, 6, 7 + n % 5]} for n in range(40)]
    rows[1]["prompt_ids"] = rows[0]["prompt_ids"]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    train(settings(tmp_path / "run", data, (file, file), **{**QUICK, "steps": 1}, held_out=None), said.append)
    assert any(line.endswith("documents left out of the training: their prompts are held out") for line in said)


def test_all_prompts_held_out_is_known_before_answers(tmp_path, data, files, no_answers):
    with pytest.raises(ConfigError, match="held-out one"):
        train(settings(tmp_path / "run", data, (files[1], files[1]), regenerate=True))


def test_long_prompts_and_cut_answers_are_told(tmp_path, data, files):
    prompts = write_prompts(tmp_path / "p.jsonl", [[5] * 60, [6] * 44, [7, 8], [9, 10]])
    held = write_prompts(tmp_path / "h.jsonl", [[5] * 50, [11, 12]])
    said = []
    config = settings(
        tmp_path / "run", data, (prompts, held), **QUICK, regenerate=True, answer_tokens=20, row_length=48
    )
    train(config, said.append)
    assert any("1 of 4 prompts in" in line and "longer than 46 tokens" in line for line in said)
    assert any("1 of 2 prompts in" in line for line in said)
    assert any("1 cut by row_length 48 before answer_tokens 20" in line for line in said)
    # the answers of another row length are other answers
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "best")
    write_prompts(prompts, [[6] * 44, [7, 8], [9, 10]])
    with pytest.raises(ConfigError, match="row_length begun with 48, now 56"):
        train(replace(config, row_length=56))


def test_a_loss_that_is_no_number(tmp_path, data, files):
    """The advice is one that can be taken."""
    with pytest.raises(ConfigError, match=r"no longer.*another folder \(out\) with a lower rate"):
        train(settings(tmp_path / "run", data, files, **{**QUICK, "rate": 1e38, "steps": 9}))


def test_weights_that_are_no_numbers(tmp_path, data, files, monkeypatch):
    """They are neither evaluated nor kept."""

    class Poisoned(run.TrainStep):
        def __call__(self, *given):
            state, figures = super().__call__(*given)
            return replace(state, weights={path: value * np.inf for path, value in state.weights.items()}), figures

    monkeypatch.setattr(run, "TrainStep", Poisoned)
    with pytest.raises(ConfigError, match="step 1: the weights are no longer numbers"):
        train(settings(tmp_path / "run", data, files, **{**QUICK, "save_every": 1}))
    assert not list((tmp_path / "run" / "checkpoints").iterdir()) and not (tmp_path / "run" / "draft").exists()


def test_a_gradient_that_is_no_number(tmp_path, data, files, monkeypatch):
    class Poisoned(run.TrainStep):
        def __call__(self, *given):
            state, figures = super().__call__(*given)
            return state, replace(figures, gradient_norm=figures.gradient_norm * np.nan)

    monkeypatch.setattr(run, "TrainStep", Poisoned)
    with pytest.raises(ConfigError, match="step 1: the gradient's norm is no longer a number; found nan"):
        train(settings(tmp_path / "run", data, files, **{**QUICK, "save_every": 1}))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_held_out_prompts_that_are_all_too_long(tmp_path, data, files):
    held = write_prompts(tmp_path / "h.jsonl", [[5] * 50])
    with pytest.raises(PromptError, match="no prompt is short enough.*a larger row_length"):
        train(settings(tmp_path / "run", data, (files[0], held), **QUICK))
